"""Real texts as test documents: the pages and the source files of this project."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from data_prep.dedup.table import Hashes

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Batch:
    """ids: uint32[n]; offsets: int64[docs + 1]."""

    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]

    def document(self, number: int) -> NDArray[np.uint32]:
        return self.ids[self.offsets[number] : self.offsets[number + 1]]


@cache
def real_texts() -> list[str]:
    """Some hundred distinct documents of 200 to 30,000 characters."""
    files = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("headrace/*.py"), *ROOT.glob("pipeline/**/*.py")])
    return [text for text in (file.read_text(encoding="utf-8") for file in files) if len(text) > 200]


@pytest.fixture
def texts() -> list[str]:
    return real_texts()


@pytest.fixture
def tokenize() -> Callable[[list[str]], Batch]:
    """A tokenizer of words, signs and white space; ids are numbered by first occurrence."""
    numbers: dict[str, int] = {}

    def of(texts: list[str]) -> Batch:
        found = [[numbers.setdefault(t, len(numbers)) for t in re.findall(r"\w+|\s+|.", text)] for text in texts]
        return batch_of(found)

    return of


def batch_of(documents: list[list[int]]) -> Batch:
    flat = [token for document in documents for token in document]
    return Batch(np.array(flat, dtype=np.uint32), np.cumsum([0, *map(len, documents)], dtype=np.int64))


def hashes_of(values: list[int]) -> Hashes:
    """uint64: the `hash_of` each value."""
    return np.array([hash_of(value) for value in values], dtype=np.uint64)


def hash_of(value: int) -> int:
    """A 64-bit hash: consecutive values are far apart."""
    return value * 0x9E3779B97F4A7C15 % (1 << 64)
