"""`python -m data_prep pack DIR --length T`: whole documents packed into training samples, with little padding.

Of each shard, blocks of `look_ahead` documents, in the order in which they lie, are cut and packed on their own: what
meets in a sample lay within one block, and memory is bounded. The result is a directory of its own in the tokens
directory, which is not touched: tokens keep their fingerprint, and may be packed for several lengths.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.executors.base import default_workers
from data_prep.executors.local import LocalExecutor
from data_prep.formats.packfile import I64, KIND, SUFFIX, cut, document_bounds, packing_name, write_pack
from data_prep.formats.tokenfile import TokenFile
from data_prep.packing.best_fit import best_fit
from data_prep.task import Counts, Report
from headrace.base.directory import Manifest, commit, fresh_staging, read_manifest
from headrace.base.errors import ConfigError, DataError
from headrace.base.lock import lock_file

LOOK_AHEAD = 1 << 16
"""Documents. Of web-like lengths it leaves 0.01 % of padding at T = 2048 and 8192, and a block takes a dozen MB."""
PACKED = "train"
"""The split that is packed. Held-out text is always evaluated in contiguous windows, every token of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m data_prep pack`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="a tokens directory")
    parser.add_argument("--length", type=int, required=True, metavar="T", help="tokens per sample, as in training")
    text = f"documents that are packed together (default: {LOOK_AHEAD:,})"
    parser.add_argument("--look-ahead", type=int, default=LOOK_AHEAD, metavar="N", help=text)
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (default: the cores there are)")


def run(arguments: argparse.Namespace) -> None:
    """Packs, and says how much of the result trains."""
    for name in ("length", "look_ahead", "workers"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(flag, getattr(arguments, name), why="it counts things", remedy="1 or more")
    directory, length = arguments.directory, arguments.length
    workers = arguments.workers or default_workers()
    manifest = pack(directory, length=length, look_ahead=arguments.look_ahead, workers=workers)
    entry = manifest.details["splits"][PACKED]
    places = entry["bins"] * length
    print(f"{directory / packing_name(length)}: {entry['bins']:,} samples of {length:,} tokens", end="; ")
    print(f"{100 * entry['targets'] / places:.2f} % of them train, {100 * entry['padding'] / places:.2f} % is padding")


def pack(directory: Path, *, length: int, look_ahead: int = LOOK_AHEAD, workers: int = 1) -> Manifest:
    """Packs the training split of a tokens directory for samples of `length` tokens.

    Returns:
        the manifest of the new directory; when it is there already, of the same making, the one it has.

    Raises:
        DataError: no tokens directory; a packing of another making is there; or another process is at it.
    """
    tokens = read_manifest(directory, kind="tokens")
    final, config = directory / packing_name(length), {"length": length, "look_ahead": look_ahead}
    parents = {"tokens": {"path": "..", "fingerprint": tokens.fingerprint}}
    if final.exists():
        return _same(final, config, parents)
    with _alone(final):
        if final.exists():  # by who had the lock a moment ago
            return _same(final, config, parents)
        staging = fresh_staging(final)
        (staging / PACKED).mkdir()
        names = [shard["name"] for shard in tokens.details["splits"][PACKED]["shards"]]
        tasks = [PackTask(directory / PACKED / name, staging / PACKED / name, length, look_ahead) for name in names]
        done = _run(tasks, workers=workers)
        sha256 = {f"{PACKED}/{task.target.name}{PACK_SUFFIX}": done[task].pop("sha256") for task in tasks}
        entries = [{"name": name} | done[task] for name, task in zip(names, tasks, strict=True)]
        sums = {key: sum(entry[key] for entry in entries) for key in ("bins", "pieces", "targets", "padding")}
        details = {**config, "splits": {PACKED: {**sums, "shards": entries}}}
        made: dict[str, Any] = {"config": config, "parents": parents, "details": details}
        return commit(staging, final, kind=PACKING_KIND, **made, known_sha256=sha256)


@dataclass(frozen=True)
class PackTask:
    """Packs one shard.

    Attributes:
        source: prefix of the shard.
        target: prefix of the pack file.
        length: T.
        look_ahead: documents that are packed together.
    """

    source: Path
    target: Path
    length: int
    look_ahead: int

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"pack of {self.source.name}"

    @property
    def finished(self) -> bool:
        """See `Task.finished`: a packing that was stopped is made anew."""
        return False

    def run(self, report: Report) -> dict[str, Any]:
        """See `Task.run`; returns bins, pieces, targets and places that are padding, and the SHA-256 of the file."""
        blocks = list(self._blocks(report))
        bins, pieces = sum(counts.size for counts, _, _ in blocks), sum(starts.size for _, starts, _ in blocks)
        first_piece = np.zeros(bins + 1, dtype=np.int64)
        np.cumsum(_joined([counts for counts, _, _ in blocks]), out=first_piece[1:])
        starts, lengths = _joined([b[1] for b in blocks]), _joined([b[2] for b in blocks])
        path = Path(f"{self.target}{PACK_SUFFIX}")
        sha256 = write_pack(path, length=self.length, first_piece=first_piece, starts=starts, lengths=lengths)
        targets, padding = int(lengths.sum()) - pieces, bins * (self.length + 1) - int(lengths.sum())
        return {"bins": bins, "pieces": pieces, "targets": targets, "padding": padding, "sha256": sha256}

    def _blocks(self, report: Report) -> Iterator[tuple[I64, I64, I64]]:
        """Pieces of each bin, and the starts and lengths of all pieces by bin."""
        file = TokenFile.open(self.source)
        for first in range(0, file.documents, self.look_ahead):
            end = min(first + self.look_ahead, file.documents)
            bounds = document_bounds(file, first, end)
            starts, lengths = cut_documents(bounds, length=self.length)
            number = best_fit(lengths, size=self.length + 1)
            order = np.argsort(number, kind="stable")
            yield np.bincount(number), starts[order], lengths[order]
            report(Counts(tokens=int(bounds[-1] - bounds[0]), documents=end - first))


@contextmanager
def _alone(final: Path) -> Iterator[None]:
    """Holds the lock of a packing.

    Its file goes when the packing is there, and not before: who has it open then still keeps others out.

    Raises:
        DataError: somebody else holds it.
    """
    path = final.parent / f".{final.name}.lock"
    with lock_file(path, doing=f"packing {final.parent} into {final.name}"):
        yield
        path.unlink(missing_ok=True)


def _run(tasks: list[PackTask], *, workers: int) -> dict[Any, dict[str, Any]]:
    if workers == 1:  # a small dataset is packed before a worker has started
        return {task: task.run(_unheard) for task in tasks}
    with LocalExecutor(workers) as executor:
        return dict(executor.run(tasks, report=_unheard))


def _unheard(_counts: Counts) -> None:
    """Packing takes seconds where data prep takes hours: nobody watches."""


def _same(final: Path, config: dict[str, Any], parents: dict[str, Any]) -> Manifest:
    manifest = read_manifest(final, kind=PACKING_KIND)
    if (manifest.config, manifest.parents) != (config, parents):
        raise DataError(f"{final} exists, and was made of other tokens or otherwise\n  try: remove it, and pack again")
    return manifest


def _joined(parts: list[I64]) -> I64:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
