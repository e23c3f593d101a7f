"""Cached logits: the teacher's likeliest ids per position, by window of a dataset, in memory-mapped files.

A record belongs to a window of a tokens directory, not to a step or a position in a batch: a run finds it from the
sample order alone. So a cache serves any layout, batch size, seed, number of epochs and mixture of its datasets.

    logits/
      manifest.json          kind `logits`; details as `LogitsFormat`, and of every source its identity and windows
      source-0.windows       int64, ascending: the windows of source 0 that have records
      source-0-00000.logits  records of the first of them, `records_per_file` in each file

A record is T x k ids (uint16, or uint32 for more than 65,536 ids), then T x (k + 1) log-probabilities at the
temperature t in fp16; the last one is for all other ids together. That is 4 k + 2 bytes per token with uint16. Records
are little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data_prep.formats.memory_map import map_file
from foundation.directory import Manifest, fingerprint_of
from foundation.errors import DataError
from pipeline.data.dataset import TokenDataset
from pipeline.data.micro_batch import MicroBatch
from pipeline.data.packed import PackedDataset
from pipeline.data.sample_order import SampleLocation, SampleOrder
from pipeline.engines.parallel.vocabulary import VocabularyShard
from pipeline.run.distillation.divergence import Divergence, bucket_divergence_and_gradient

KIND = "logits"
_LOCATED: Final = 1 << 20
"""Number of samples that are located at a time."""

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LogitsFormat:
    """Format of the records, and the teacher and samples from which they were computed.

    Attributes:
        top_k: number of ids per position, k.
        temperature: temperature of the log-probabilities, t.
        vocab_size: number of ids of the teacher's vocabulary.
        sequence_length: number of positions of a sample, T.
        mask_documents: whether the documents of a sample were masked from each other for the teacher.
        tokenizer: fingerprint of the datasets' tokenizer.
        teacher: fingerprint of the teacher's folder.
        records_per_file: number of records of a full file.
        dtype: dtype in which the teacher computed.
    """

    top_k: int
    temperature: float
    vocab_size: int
    sequence_length: int
    mask_documents: bool
    tokenizer: str
    teacher: str
    records_per_file: int
    dtype: str = "float32"

    @property
    def content(self) -> str:
        """Fingerprint of everything that determines a record, whatever windows a directory has."""
        return fingerprint_of({key: value for key, value in asdict(self).items() if key != "records_per_file"})

    @property
    def record(self) -> np.dtype[Any]:
        """The dtype of a record."""
        length, k = self.sequence_length, self.top_k
        ids = "<u2" if self.vocab_size <= 1 << 16 else "<u4"
        return np.dtype([("ids", ids, (length, k)), ("logs", "<f2", (length, k + 1))])

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a record per position."""
        return self.record.itemsize // self.sequence_length


def identity(source: TokenDataset) -> dict[str, Any]:
    """Returns the fields that identify a dataset: if they are equal, window w has the same tokens."""
    packing = source.packing.fingerprint if isinstance(source, PackedDataset) else None
    return {"fingerprint": source.manifest.fingerprint, "source": source.source, "packing": packing}


class CachedLogits:
    """The records of a run's samples, as opened by `open_logits.open_logits`.

    Args:
        path: the directory of the logits.
        numbers: number of every source of the mixture within the directory.
    """

    def __init__(self, path: Path, manifest: Manifest, numbers: Sequence[int]) -> None:
        fields = LogitsFormat.__dataclass_fields__
        self.format = LogitsFormat(**{key: manifest.details[key] for key in fields if key in manifest.details})
        self._path, self._manifest, self._numbers = path, manifest, list(numbers)
        self._windows = [map_file(path / f"source-{number}.windows").view("<i8") for number in numbers]
        self._files: dict[tuple[int, int], npt.NDArray[Any]] = {}

    @property
    def parents(self) -> dict[str, Any]:
        """Returns path and fingerprint of the cached logits, for manifests and for the check on resume."""
        return {"distill.logits": {"path": str(self._path), "fingerprint": self._manifest.fingerprint}}

    def check_has(self, order: SampleOrder, samples: int) -> None:
        """Refuses a run with a sample that has no record.

        Raises:
            DataError: a sample has no record; the error names the first one.
        """
        if self.has_all(order):
            return
        for first in range(0, samples, _LOCATED):
            wanted = np.arange(first, min(samples, first + _LOCATED), dtype=np.int64)
            self._slots(order.locate(wanted))

    def has_all(self, order: SampleOrder) -> bool:
        """Tells whether every window of every source has a record."""
        return all(mine.size == total for mine, total in zip(self._windows, order.windows.tolist(), strict=True))

    def read(self, location: SampleLocation) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
        """Reads the records of samples: ids int32 [n, T, k] and log-probabilities fp16 [n, T, k + 1].

        Raises:
            DataError: a sample has no record.
        """
        slots, each = self._slots(location), self.format.records_per_file
        length, k = self.format.sequence_length, self.format.top_k
        ids = np.empty((slots.size, length, k), dtype=np.int32)
        logs = np.empty((slots.size, length, k + 1), dtype=np.float16)
        for row, (source, slot) in enumerate(zip(location.source.tolist(), slots.tolist(), strict=True)):
            record = self._file(source, slot // each)[slot % each]
            ids[row], logs[row] = record["ids"], record["logs"]
        return ids, logs

    def _slots(self, location: SampleLocation) -> I64:
        slots = np.empty_like(location.window)
        for source in np.unique(location.source):
            mine, have = location.source == source, self._windows[int(source)]
            wanted = location.window[mine]
            found = np.searchsorted(have, wanted)
            # a source that the cache never drew has no records
            there = have[np.minimum(found, have.size - 1)] == wanted if have.size else np.zeros(wanted.shape, bool)
            missing = np.flatnonzero(~there)
            if missing.size:
                what = f"{self._path} has {have.size:,} windows of source {source}, and not its window"
                raise DataError(
                    f"{what} {int(wanted[missing[0]])}, which the run draws\n"
                    f"  try: headrace cache-logits with this config (its data, run.seed, run.steps), or distill.teacher"
                )
            slots[mine] = found
        return slots

    def _file(self, source: int, number: int) -> npt.NDArray[Any]:
        key = source, number
        if key not in self._files:
            path = self._path / file_name(self._numbers[source], number)
            self._files[key] = map_file(path, random_access=True).view(self.format.record)
        return self._files[key]


def file_name(source: int, number: int) -> str:
    """Returns the name of a file of records."""
    return f"source-{source}-{number:05d}.logits"


def described(layout: LogitsFormat, sources: Sequence[TokenDataset], windows: Sequence[I64]) -> dict[str, Any]:
    """Returns the details of a manifest."""
    entries = [
        {**identity(source), "path": str(source.path), "windows": source.windows, "records": int(mine.size)}
        for source, mine in zip(sources, windows, strict=True)
    ]
    return {**asdict(layout), "bytes_per_token": layout.bytes_per_token, "sources": entries}


class CachedReference:
    """Compares a student with the cached logits in a micro-batch; an `objective.Reference`."""

    def targets(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Returns ids int32 [B, T, k] and log-probabilities fp16 [B, T, k + 1]."""
        assert batch.target_ids is not None
        assert batch.target_logs is not None
        return batch.target_ids, batch.target_logs

    @torch.no_grad()
    def compare(
        self, divergence: Divergence, logits: Tensor, labels: Tensor, *targets: Tensor, vocabulary: VocabularyShard
    ) -> tuple[Tensor, Tensor]:
        """Computes the divergence over the k ids and the rest, and its gradient."""
        ids, logs = targets
        return bucket_divergence_and_gradient(divergence, ids.long(), logs, logits, labels, vocabulary)
