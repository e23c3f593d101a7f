"""Merge: one run out of many, of a range of keys. Only in jobs of very many runs.

A shard is gathered out of every run that there is. With R runs, and tokens of N times the memory of a reduce task, that
is R x N small reads: the square of the corpus. Merged in groups of about sqrt(R), all is read in 2 x sqrt(R) x N
pieces; that costs one more pass over the tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.task import Counts, DirectoryTask, Report
from data_prep.tasks.gather import KEYS, Gather
from data_prep.tasks.sorted_runs import RunStream, SortedRunPaths, run_path, task_directory

MOST_RUNS = 1 << 12
"""From here on one more pass (0.5 GB/s) costs less than opening all runs (50 us) for each 64 MiB that are written."""
_MERGED_BYTES = 1 << 30


@dataclass(frozen=True)
class MergeTask(DirectoryTask):
    """Merges some runs into `directory/run-000`: documents with keys in [low, high), but for those that are dropped.

    Args:
        gather: what is merged.
        tokens: about how many they are.
    """

    gather: Gather
    low: int
    high: int
    tokens: int
    directory: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"merge task {self.directory.name}"

    def _work(self, scratch: Path, report: Report) -> dict[str, Any]:
        with RunStream(run_path(scratch, 0), masked=self.gather.masked) as stream:
            for group, content in self.gather.contents(self.low, self.high).items():
                for part in self.gather.ranges(group, self.low, self.high, content):
                    stream.add(part.documents, part.ids, part.mask)
                    report(Counts(tokens=int(part.documents["tokens"].sum()), documents=len(part.documents)))
        return {"runs": 1}


@dataclass(frozen=True)
class Merges:
    """How the runs of a job are merged: `parts` ranges of keys of each `each` runs. tokens: of the job, about."""

    gather: Gather
    each: int
    parts: int
    tokens: int
    directory: Path

    def tasks(self) -> list[MergeTask]:
        """All of them."""
        firsts = range(0, len(self.gather.runs), self.each)
        groups = [replace(self.gather, runs=self.gather.runs[i : i + self.each], first=i) for i in firsts]
        share = self.tokens // (len(groups) * self.parts)
        return [
            MergeTask(group, *self._bounds(part), share, task_directory(self.directory, part * len(groups) + number))
            for part in range(self.parts)
            for number, group in enumerate(groups)
        ]

    def merged(self, low: int, high: int) -> Gather:
        """What holds the keys in [low, high) when all tasks have finished."""
        numbers = -(-len(self.gather.runs) // self.each)
        inside = [part for part in range(self.parts) if self._bounds(part)[0] < high and low < self._bounds(part)[1]]
        merged = SortedRunPaths(self.directory, (1,) * numbers * len(inside), first=inside[0] * numbers)
        return replace(self.gather, runs=merged, drops=None)

    def _bounds(self, part: int) -> tuple[int, int]:
        return KEYS * part // self.parts, KEYS * (part + 1) // self.parts


def plan_merges(gather: Gather, tokens: int, *, directory: Path) -> Merges | None:
    """How the runs of a job are merged; None where they are few.

    Args:
        gather: all runs of the job.
        tokens: how many are kept, in all.
        directory: for the tasks' own ones.
    """
    runs = len(gather.runs)
    if runs <= MOST_RUNS:
        return None
    each = math.isqrt(runs - 1) + 1
    size = tokens * np.dtype(gather.dtype).itemsize
    parts = max(1, round(size / (-(-runs // each) * _MERGED_BYTES)))
    return Merges(gather, each, parts, tokens, directory)
