"""Merge: one run out of many, of a range of keys. Only in jobs of very many runs.

A shard is gathered out of every run that there is. With R runs, and tokens of N times the memory of a reduce task, that
is R x N small reads: the square of the corpus. Merged in groups of about sqrt(R), each run is read N / sqrt(R) times as
often and a shard is gathered out of sqrt(R) of them; that costs one more pass over the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_prep.runs import Array, RunStream, run_path
from data_prep.tasks.base import Counts, DirectoryTask, Report
from data_prep.tasks.gather import KEYS, Gather

MOST_RUNS = 1 << 12
"""From here on one more pass (0.5 GB/s) costs less than opening all runs (50 us) for each 64 MiB that are written."""
_MERGED_BYTES = 1 << 30


@dataclass(frozen=True)
class MergeTask(DirectoryTask):
    """Merges some runs into `directory/run-000`: documents with keys in [low, high), but for those that are dropped.

    Args:
        groups: (number of the split, of the source, about how many tokens), ascending.
        gather: what is merged.
    """

    groups: tuple[tuple[int, int, int], ...]
    low: int
    high: int
    gather: Gather
    directory: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"merge task {self.directory.name}"

    @property
    def tokens(self) -> int:
        """About how many."""
        return sum(tokens for _, _, tokens in self.groups)

    @property
    def merged(self) -> Path:
        """The run that it makes."""
        return run_path(self.directory, 0)

    def _work(self, scratch: Path, report: Report) -> dict[str, Any]:
        with RunStream(run_path(scratch, 0), masked=self.gather.masked) as stream:
            for split, source, tokens in self.groups:
                for part in self.gather.ranges((split, source), self.low, self.high, tokens=tokens):
                    stream.add(part.documents, part.ids, part.mask)
                    report(Counts(tokens=int(part.documents["tokens"].sum()), documents=len(part.documents)))
        return {"runs": 1}


def plan_merges(gather: Gather, tokens: Array, *, itemsize: int, directory: Path) -> list[MergeTask]:
    """The merge tasks of a job; none where its runs are few.

    Args:
        gather: all runs of the job.
        tokens: int64 [sources, splits], how many are kept.
        itemsize: bytes of each.
        directory: for the tasks' own ones.
    """
    runs = len(gather.runs)
    if runs <= MOST_RUNS:
        return []
    each = math.isqrt(runs - 1) + 1
    firsts = range(0, runs, each)
    parts = max(1, round(int(tokens.sum()) * itemsize / (len(firsts) * _MERGED_BYTES)))
    share = len(firsts) * parts
    groups = tuple(
        (split, source, int(tokens[source, split]) // share + 1)
        for split in range(tokens.shape[1])
        for source in range(tokens.shape[0])
        if tokens[source, split]
    )
    tasks = []
    for part in range(parts):
        low, high = KEYS * part // parts, KEYS * (part + 1) // parts
        for number, first in enumerate(firsts):
            some = replace(gather, runs=gather.runs[first : first + each], first=first)
            tasks.append(MergeTask(groups, low, high, some, directory / f"{part:05d}-{number:05d}"))
    return tasks


def merged_runs(tasks: Sequence[MergeTask], low: int, high: int) -> list[Path]:
    """The runs that may hold keys in [low, high)."""
    return [task.merged for task in tasks if task.low < high and low < task.high]
