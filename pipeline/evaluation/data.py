"""Which text a model is judged on, and whether the two belong together. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from data_prep.tokenizer.fingerprint import tokenizer_fingerprint
from headrace.base.errors import ConfigError, DataError
from headrace.base.section import Section
from pipeline.data.dataset import TokenDataset, choose_windows, tokenizer_details
from pipeline.evaluation.model_folder import ModelFolder

_COUNTED_WINDOWS = 256
"""Windows whose masks are in memory at one time."""


class HeldOutData(Section):
    """The part of a tokens directory that a model is evaluated on."""

    path: str = Field(description="a tokens directory, as python -m data_prep writes it")
    split: str = Field(default="heldout", description="a split of the tokens directory: heldout or train")
    sequence_length: int = Field(
        default=256, ge=1, description="tokens per window; at most what the model was made for"
    )
    batch_size: int = Field(default=8, ge=1, description="windows per forward pass; only speed and memory depend on it")
    max_tokens: int | None = Field(
        default=None, ge=1, description="evaluate about so many tokens; null for all of the split"
    )

    @property
    def max_windows(self) -> int | None:
        """`max_tokens` in whole windows, at least one; None for all."""
        return None if self.max_tokens is None else max(1, self.max_tokens // self.sequence_length)


class FieldNames(NamedTuple):
    """How a caller's user knows the fields: dotted in a config, with dashes on a command line."""

    path: str = "data.path"
    sequence_length: str = "data.sequence_length"


def open_heldout(data: HeldOutData, folder: ModelFolder, *, names: FieldNames | None = None) -> TokenDataset:
    """Opens the split after checking that its token ids mean to the model what they meant to the tokenizer.

    Raises:
        ConfigError: windows longer than the model's positions; another vocabulary; another tokenizer.
        DataError: the directory or the split is missing, damaged, or too short for one window; or nothing is learnt in
            the windows that would be scored.
    """
    names = names or FieldNames()
    longest = folder.longest_sequence
    if longest is not None and data.sequence_length > longest:
        why = f"{folder.path} was made for {longest} positions"
        raise ConfigError(names.sequence_length, data.sequence_length, why=why, remedy=f"{longest}, or less")
    dataset = TokenDataset.open(data.path, split=data.split, sequence_length=data.sequence_length)
    _check_tokenizer(folder, dataset, names.path)
    count_targets(dataset, choose_windows(dataset.windows, data.max_windows))
    return dataset


def count_targets(dataset: TokenDataset, windows: npt.NDArray[np.int64]) -> int:
    """Targets of windows on which the loss may be taken: all of them, or those that the mask of the tokens has.

    Raises:
        DataError: there is none.
    """
    if not dataset.masked:
        return windows.size * dataset.sequence_length
    pieces = np.array_split(windows, -(-windows.size // _COUNTED_WINDOWS))
    found = sum(int(dataset.loss_mask(piece)[:, 1:].sum()) for piece in pieces)
    if not found:
        which = f"the {windows.size:,} windows of {dataset.sequence_length} tokens that would be scored"
        why = f"{dataset.label}: its loss mask lets nothing be learnt in {which}"
        raise DataError(f"{why}\n  try: more tokens of it, longer windows, or another dataset")
    return found


def _check_tokenizer(folder: ModelFolder, dataset: TokenDataset, field: str) -> None:
    tokenizer = tokenizer_details(dataset.manifest)
    remedy = f"evaluate on a dataset tokenized with {folder.path}'s own tokenizer"
    size = int(str(tokenizer["vocab_size"]))
    if size > folder.vocab_size:
        why = f"its tokenizer has {size} ids, the model {folder.path} takes {folder.vocab_size}"
        raise ConfigError(field, str(dataset.path), why=why, remedy=remedy)
    if not (folder.path / "tokenizer.json").is_file():
        return  # a model without a tokenizer can only be held to the vocabulary
    own, theirs = tokenizer_fingerprint(Path(folder.path)), str(tokenizer["fingerprint"])
    if own != theirs:
        why = f"it was made with tokenizer {theirs[:12]}, the model {folder.path} has tokenizer {own[:12]}"
        raise ConfigError(field, str(dataset.path), why=why, remedy=remedy)
