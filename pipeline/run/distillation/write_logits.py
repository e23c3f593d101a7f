"""Writes cached logits: a batch job in tasks, one file each, in any number of processes that do not communicate.

Process r of n computes tasks r, r + n, ... A task's file gets its name when it is complete, so a killed job goes on
with the missing tasks, on any number of processes. A process that finds all files commits the directory.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foundation.directory import MANIFEST, commit, fingerprint_of
from foundation.errors import DataError
from foundation.lock import lock_file
from foundation.remote_output import finished
from pipeline.data.dataset import TokenDataset
from pipeline.data.micro_batch import MicroBatch, make_batch
from pipeline.data.packed import PackedDataset
from pipeline.data.sample_order import SampleOrder
from pipeline.run.distillation.cached_logits import I64, KIND, LogitsFormat, described, file_name, identity
from pipeline.run.distillation.divergence import SMALLEST_REST, log_probabilities

FILE_BYTES: Final = 64 << 20
"""Approximate bytes of a file of records: a killed job loses the file that it is writing."""
_LOCATED: Final = 1 << 20

LogitsOf = Callable[[MicroBatch], Iterator[Tensor]]
"""Function that yields a teacher's logits of a batch [rows, V], some rows at a time, in order."""


@dataclass(frozen=True)
class LogitsPlan:
    """The records to write.

    Attributes:
        sources: the datasets.
        windows: windows with a record, ascending, for every dataset.
    """

    format: LogitsFormat
    sources: tuple[TokenDataset, ...]
    windows: tuple[I64, ...]

    @property
    def fingerprint(self) -> str:
        """Fingerprint that is equal for jobs whose files can be combined."""
        chosen = [hashlib.sha256(mine.tobytes()).hexdigest() for mine in self.windows]
        return fingerprint_of([asdict(self.format), [identity(each) for each in self.sources], chosen])

    @property
    def tasks(self) -> list[tuple[int, int]]:
        """(source, number of its file) of every task."""
        each = self.format.records_per_file
        return [(s, n) for s, mine in enumerate(self.windows) for n in range(-(-mine.size // each))]

    @property
    def tokens(self) -> int:
        """Number of positions of all records."""
        return sum(mine.size for mine in self.windows) * self.format.sequence_length


def records_per_file(length: int, top_k: int) -> int:
    """Returns the number of records in a file of about `FILE_BYTES`."""
    return max(1, FILE_BYTES // (length * (4 * top_k + 2)))


def drawn_windows(order: SampleOrder, samples: int) -> tuple[I64, ...]:
    """Returns the windows that a run's first `samples` samples draw from every source, ascending, each once."""
    drawn = [np.zeros(size, dtype=np.bool_) for size in order.windows.tolist()]
    for first in range(0, samples, _LOCATED):
        location = order.locate(np.arange(first, min(samples, first + _LOCATED), dtype=np.int64))
        for source in np.unique(location.source).tolist():
            drawn[source][location.window[location.source == source]] = True
    return tuple(np.flatnonzero(each) for each in drawn)


def merged(sources: Sequence[TokenDataset], windows: Sequence[I64]) -> tuple[tuple[TokenDataset, ...], tuple[I64, ...]]:
    """Merges datasets of equal `identity`, with the windows of all their places in a mixture, ascending."""
    once: dict[str, tuple[TokenDataset, list[I64]]] = {}
    for source, mine in zip(sources, windows, strict=True):
        once.setdefault(fingerprint_of(identity(source)), (source, []))[1].append(mine)
    return tuple(each for each, _ in once.values()), tuple(np.unique(np.concatenate(w)) for _, w in once.values())


def write_logits(
    plan: LogitsPlan,
    final: Path,
    logits_of: LogitsOf,
    *,
    batch: int,
    parents: dict[str, Any],
    rank: int = 0,
    processes: int = 1,
    say: Callable[[str], None] = print,
) -> bool:
    """Computes this process's missing tasks, and commits the directory if it finds all files.

    Args:
        plan: the records to write.
        final: the final directory.
        logits_of: computes the teacher's logits of a batch.
        batch: number of samples of a forward pass.
        parents: parents of the manifest, by config field: path and fingerprint.
        rank, processes: index of this process, and number of processes.
        say: prints a line about every file.

    Returns:
        Whether the directory is complete.

    Raises:
        DataError: `final` holds something else.
    """
    if is_written(plan, final):
        return True
    staging = final.parent / f".{final.name}.{plan.fingerprint[:12]}.partial"
    staging.mkdir(parents=True, exist_ok=True)
    mine = plan.tasks[rank::processes]
    for done, (source, number) in enumerate(mine, start=1):
        name = file_name(source, number)
        if not _is_done(staging, name):
            _write(staging, name, _records(plan, source, number, logits_of, batch=batch))
            say(f"{name} ({done} of {len(mine)} files of process {rank})")
    return _commit_if_whole(plan, staging, final, parents)


def is_written(plan: LogitsPlan, final: str | Path) -> bool:
    """Tells whether the finished directory exists.

    Raises:
        DataError: the directory holds something else.
    """
    found = finished(final, kind=KIND)
    if found is None:
        return False
    if found.details.get("plan") != plan.fingerprint:
        why = f"{final} holds logits of another teacher, data or format"
        raise DataError(f"{why}\n  try: remove it, or choose another distill.logits")
    return True


def _records(
    plan: LogitsPlan, source: int, number: int, logits_of: LogitsOf, *, batch: int
) -> Iterator[npt.NDArray[Any]]:
    """Yields the records of a file, one batch at a time."""
    each, dataset = plan.format.records_per_file, plan.sources[source]
    windows = plan.windows[source][number * each : (number + 1) * each]
    for first in range(0, windows.size, batch):
        chosen = windows[first : first + batch]
        masked = plan.format.mask_documents
        boundaries = dataset.boundaries(chosen) if masked or isinstance(dataset, PackedDataset) else None
        inputs = make_batch(dataset.rows(chosen), boundaries, mask_documents=masked)
        yield _encoded(plan.format, logits_of(inputs), count=chosen.size)


def _encoded(layout: LogitsFormat, logits: Iterator[Tensor], *, count: int) -> npt.NDArray[Any]:
    """Encodes the logits of count x T positions as records [count]."""
    pairs = [_top(each, layout) for each in logits]
    records = np.zeros(count, dtype=layout.record)
    for field, parts in zip(("ids", "logs"), zip(*pairs, strict=True), strict=True):
        records[field] = torch.cat(parts).numpy().reshape(records[field].shape)
    return records


def _top(logits: Tensor, layout: LogitsFormat) -> tuple[Tensor, Tensor]:
    """Selects ids int64 [rows, k] and log-probabilities fp16 [rows, k + 1], on the CPU."""
    log_p = log_probabilities(logits, layout.temperature)
    values, ids = log_p.topk(layout.top_k, dim=-1)
    if layout.top_k == layout.vocab_size:
        rest = torch.full_like(values[:, :1], -torch.inf)
    else:
        rest = log_p.scatter_(-1, ids, -torch.inf).logsumexp(-1, keepdim=True).clamp(min=SMALLEST_REST)
    return ids.cpu(), torch.cat([values, rest], dim=-1).half().cpu()


def _write(staging: Path, name: str, records: Iterator[npt.NDArray[Any]]) -> None:
    partial, digest = staging / f".{name}.{os.getpid()}", hashlib.sha256()
    try:
        with partial.open("wb") as file:
            for each in records:
                data = each.tobytes()
                digest.update(data)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        (staging / f"{name}.sha256").write_text(digest.hexdigest())
        partial.replace(staging / name)
    finally:
        partial.unlink(missing_ok=True)


def _is_done(staging: Path, name: str) -> bool:
    return (staging / name).is_file() and (staging / f"{name}.sha256").is_file()


def _commit_if_whole(plan: LogitsPlan, staging: Path, final: Path, parents: dict[str, Any]) -> bool:
    with lock_file(final.parent / f".{final.name}.lock", doing=f"finishing {final}", timeout_s=math.inf):
        if (final / MANIFEST).is_file():  # committed by another process a moment ago
            return True
        names = [file_name(*task) for task in plan.tasks]
        if not all(_is_done(staging, name) for name in names):
            return False
        known = {name: (staging / f"{name}.sha256").read_text() for name in names}
        ready = final.parent / f".{final.name}.ready.partial"
        shutil.rmtree(ready, ignore_errors=True)
        ready.mkdir()
        for name in names:  # linked: a killed commit leaves the finished files in place
            os.link(staging / name, ready / name)
        for source, mine in enumerate(plan.windows):
            (ready / f"source-{source}.windows").write_bytes(mine.astype("<i8").tobytes())
        details = {**described(plan.format, plan.sources, plan.windows), "plan": plan.fingerprint}
        commit(ready, final, kind=KIND, config={}, parents=parents, details=details, known_sha256=known)
        shutil.rmtree(staging, ignore_errors=True)
    return True
