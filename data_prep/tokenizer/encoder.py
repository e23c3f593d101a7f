"""The tokenizer as the map tasks use it: an engine, what frames a document, and the dtype of its ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.config.text_policy import ENGINE_FILE, TextPolicy
from data_prep.formats.tokenfile import dtype_for
from data_prep.tokenizer.engines import Engine, Tokens, open_engine
from data_prep.tokenizer.load import load, special_ids, vocab_size
from data_prep.tokenizer.proof import check_sample


@dataclass(frozen=True)
class Encoder:
    """Turns texts into ids. before, after: ids that frame every document."""

    engine: Engine
    folder: Path
    special: bool
    before: tuple[int, ...]
    after: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def frame(self) -> int:
        """How many ids frame a document."""
        return len(self.before) + len(self.after)

    def encode(self, texts: list[str]) -> Tokens:
        """The ids of each text, without its frame."""
        return self.engine.encode(texts)

    def check(self, texts: list[str], *, where: str) -> None:
        """Compares with the reference on a few of the texts; see `proof.check_sample`."""
        check_sample(self.engine, self.folder, texts, special=self.special, where=where)


@cache
def open_encoder(folder: Path, policy: TextPolicy) -> Encoder:
    """Opens a tokenizer folder that has its `ENGINE_FILE` beside it; kept for the next task of the same process."""
    engine = json.loads((folder.parent / ENGINE_FILE).read_text())["engine"]
    tokenizer = load(folder)
    ids = special_ids(folder, tokenizer)
    before = (ids["bos_id"],) if policy.bos else ()
    after = (ids["eos_id"],) if policy.eos else ()
    return Encoder(
        open_engine(engine, folder, special=policy.special),
        folder,
        policy.special,
        tuple(i for i in before if i is not None),
        tuple(i for i in after if i is not None),
        dtype_for(vocab_size(tokenizer)),
    )
