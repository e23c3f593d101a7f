"""Held-out data of an evaluation, and checks that it fits the model. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from data_prep.tokenizer.fingerprint import tokenizer_fingerprint
from foundation.errors import ConfigError, DataError
from foundation.paths import PathOrUrl
from foundation.section import Section
from pipeline.data.dataset import TokenDataset, choose_windows, tokenizer_details
from pipeline.models.folder.model_folder import ModelFolder, trained_data

_COUNTED_WINDOWS = 256
"""Number of windows whose loss masks are in memory at a time."""


class HeldOutData(Section):
    """The part of a tokens directory that a model is evaluated on."""

    path: PathOrUrl = Field(description="Tokens directory written by headrace prep, or its URL, e.g. out/demo/tokens")
    split: str = Field(default="heldout", description="Split of the tokens directory to evaluate: heldout or train")
    sequence_length: int = Field(
        default=256,
        ge=1,
        description="Tokens per evaluated window, e.g. 1024; at most the model's max_position_embeddings. When absent,"
        " the length that the model was trained with, by its manifest; 256 without one",
    )
    mask_documents: bool = Field(
        default=False,
        description="Document mask: attention stays within a document, and no loss is taken across document boundaries."
        " When absent, as the model was trained, by its manifest",
    )
    batch_size: int = Field(
        default=8, ge=1, description="Windows per forward pass, e.g. 16; affects speed and memory only"
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Evaluate about this many tokens, evenly spaced over the split, e.g. 1e6; null: the whole split",
    )

    @property
    def max_windows(self) -> int | None:
        """`max_tokens` in whole windows, at least one; None for all."""
        return None if self.max_tokens is None else max(1, self.max_tokens // self.sequence_length)


def as_trained(data: HeldOutData, model: Path) -> HeldOutData:
    """Fills in missing fields from the model's training: the losses can then be compared.

    Args:
        data: the section as written.
        model: directory of the model; its manifest has the config of its training or quantization.
    """
    trained = trained_data(model)
    names = ("sequence_length", "mask_documents")
    update = {name: trained[name] for name in names if name in trained and name not in data.model_fields_set}
    return data.model_copy(update=update)


class FieldNames(NamedTuple):
    """Names of the fields in error messages: dotted in a config, with dashes on a command line."""

    path: str = "data.path"
    sequence_length: str = "data.sequence_length"


def open_heldout(data: HeldOutData, folder: ModelFolder, *, names: FieldNames | None = None) -> TokenDataset:
    """Opens the split and checks that its tokens were made with the model's tokenizer.

    Raises:
        ConfigError: windows longer than the model's positions; another vocabulary or tokenizer.
        DataError: the directory or the split is missing, damaged, or too short for one window; or its loss
            mask leaves no target in the windows.
    """
    names = names or FieldNames()
    longest = folder.longest_sequence
    if longest is not None and data.sequence_length > longest:
        why = f"{folder.path} has max_position_embeddings {longest}"
        raise ConfigError(names.sequence_length, data.sequence_length, why=why, remedy=f"use {longest} or less")
    dataset = TokenDataset.open(data.path, split=data.split, sequence_length=data.sequence_length)
    _check_tokenizer(folder, dataset, names.path)
    count_targets(dataset, choose_windows(dataset.windows, data.max_windows), mask_documents=data.mask_documents)
    return dataset


def count_targets(dataset: TokenDataset, windows: npt.NDArray[np.int64], *, mask_documents: bool = False) -> int:
    """Counts target tokens in windows: all tokens, or only those in the loss mask or within documents.

    Raises:
        DataError: there are no target tokens.
    """
    if not dataset.masked and not mask_documents:
        return windows.size * dataset.sequence_length
    found = int(count_targets_of_each(dataset, windows, mask_documents=mask_documents).sum())
    if not found:
        which = f"the {windows.size:,} windows of {dataset.sequence_length} tokens to evaluate"
        why = f"{dataset.label}: its loss mask leaves no target in {which}"
        raise DataError(f"{why}\n  try: more tokens, longer windows, or another dataset")
    return found


def count_targets_of_each(
    dataset: TokenDataset, windows: npt.NDArray[np.int64], *, mask_documents: bool
) -> npt.NDArray[np.int64]:
    """Counts the target tokens of each window, int64 [n]."""
    if not dataset.masked and not mask_documents:
        return np.full(windows.size, dataset.sequence_length, dtype=np.int64)
    pieces = np.array_split(windows, -(-windows.size // _COUNTED_WINDOWS))
    found = [targets_of(dataset, piece, mask_documents=mask_documents).sum(axis=1) for piece in pieces]
    return np.concatenate(found).astype(np.int64)


def loss_by_source(
    dataset: TokenDataset,
    windows: npt.NDArray[np.int64],
    losses: npt.NDArray[np.float64],
    targets: npt.NDArray[np.int64],
) -> dict[str, float]:
    """Mean loss of each source, nats per target token. Each window has one source, as shards do.

    Args:
        dataset: dataset whose manifest names the sources; without names the result is empty.
        windows: indices of the windows, int64 [n].
        losses: loss of each window, summed over its targets, nats, float64 [n].
        targets: number of targets of each window, int64 [n].
    """
    names = dataset.sources_of(windows)
    found = {}
    for name in sorted({name for name in names if name is not None}):
        of_source = np.array([each == name for each in names])
        if targets[of_source].any():
            found[name] = float(losses[of_source].sum() / targets[of_source].sum())
    return found


def targets_of(dataset: TokenDataset, windows: npt.NDArray[np.int64], *, mask_documents: bool) -> npt.NDArray[np.bool_]:
    """bool [n, T]: whether the token that follows each input is a target."""
    targets = dataset.loss_mask(windows)[:, 1:]
    if mask_documents:
        dataset.boundaries(windows).clear_non_targets(targets, masked=True)
    return targets


def _check_tokenizer(folder: ModelFolder, dataset: TokenDataset, field: str) -> None:
    tokenizer = tokenizer_details(dataset.manifest)
    remedy = f"evaluate on a dataset tokenized with {folder.path}'s own tokenizer"
    size = int(str(tokenizer["vocab_size"]))
    if size > folder.vocab_size:
        why = f"its tokenizer has {size} ids, and the model {folder.path} has a vocabulary of {folder.vocab_size}"
        raise ConfigError(field, str(dataset.path), why=why, remedy=remedy)
    if not (folder.path / "tokenizer.json").is_file():
        return  # without a tokenizer only the size of the vocabulary can be checked
    own, theirs = tokenizer_fingerprint(Path(folder.path)), str(tokenizer["fingerprint"])
    if own != theirs:
        why = f"it was made with tokenizer {theirs[:12]}, and the model {folder.path} has tokenizer {own[:12]}"
        raise ConfigError(field, str(dataset.path), why=why, remedy=remedy)
