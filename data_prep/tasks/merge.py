"""The merge task: merges a range of keys from many sorted runs into one run. Only in jobs with very many runs.

A shard is read from every run. With R runs, and N times as many tokens as a reduce task's memory holds, there are R x N
small reads: the square of the corpus. If groups of about sqrt(R) runs are merged first, there are 2 x sqrt(R) x N
reads, at the cost of one more pass over the tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data_prep.task import Counts, DirectoryTask, Marker, Report
from data_prep.tasks.runs_reader import KEYS, RunsReader
from data_prep.tasks.sorted_runs import RunStream, SortedRunPaths, run_path, task_directory

MOST_RUNS = 1 << 12
"""Largest number of unmerged runs: with more, a pass (0.5 GB/s) costs less than opening each (50 us) per 64 MiB."""
_MERGED_BYTES = 1 << 30


@dataclass(frozen=True)
class MergeTask(DirectoryTask):
    """Merges some runs into `directory/run-000`: documents with keys in [low, high), except dropped ones.

    Args:
        reader: reader of the runs to merge.
        tokens: approximate number of tokens to merge.
    """

    kind = "merge task"
    reader: RunsReader
    low: int
    high: int
    tokens: int
    directory: Path

    def _work(self, scratch: Path, report: Report) -> Marker:
        with RunStream(run_path(scratch, 0), masked=self.reader.masked) as stream:
            for group, content in self.reader.contents(self.low, self.high).items():
                for part in self.reader.ranges(group, self.low, self.high, content):
                    stream.add(part.documents, part.ids, part.mask)
                    report(Counts(tokens=int(part.documents["tokens"].sum()), documents=len(part.documents)))
        return {"runs": 1}


@dataclass(frozen=True)
class MergePlan:
    """Plan for merging the runs of a job: groups of `runs_per_group` runs and `parts` ranges of keys.

    Attributes:
        tokens: approximate number of tokens of the whole job.
    """

    reader: RunsReader
    runs_per_group: int
    parts: int
    tokens: int
    directory: Path

    def tasks(self) -> list[MergeTask]:
        """The merge tasks: one for each group of runs and range of keys."""
        size = self.runs_per_group
        firsts = range(0, len(self.reader.runs), size)
        groups = [replace(self.reader, runs=self.reader.runs[i : i + size], first=i) for i in firsts]
        tokens = self.tokens // (len(groups) * self.parts)
        return [
            MergeTask(group, *self._bounds(part), tokens, task_directory(self.directory, part * len(groups) + number))
            for part in range(self.parts)
            for number, group in enumerate(groups)
        ]

    def merged_reader(self, low: int, high: int) -> RunsReader:
        """A reader of the merged runs with keys in [low, high); use it when all tasks have finished."""
        groups = -(-len(self.reader.runs) // self.runs_per_group)
        parts = [part for part in range(self.parts) if self._bounds(part)[0] < high and low < self._bounds(part)[1]]
        merged = SortedRunPaths(self.directory, (1,) * groups * len(parts), first=parts[0] * groups)
        return replace(self.reader, runs=merged, drops=None)

    def _bounds(self, part: int) -> tuple[int, int]:
        return KEYS * part // self.parts, KEYS * (part + 1) // self.parts


def plan_merges(reader: RunsReader, tokens: int, *, directory: Path) -> MergePlan | None:
    """Plans the merge of a job's runs; returns None for up to `MOST_RUNS` runs.

    Args:
        reader: reader of all runs of the job.
        tokens: total number of kept tokens.
        directory: parent of the tasks' directories.
    """
    runs = len(reader.runs)
    if runs <= MOST_RUNS:
        return None
    runs_per_group = math.isqrt(runs - 1) + 1
    size = tokens * np.dtype(reader.dtype).itemsize
    parts = max(1, round(size / (-(-runs // runs_per_group) * _MERGED_BYTES)))
    return MergePlan(reader, runs_per_group, parts, tokens, directory)
