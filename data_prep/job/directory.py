"""The job directory, beside the output: the state from which a job resumes. It is removed at the end.

`.NAME.job/` belongs to one config and one listing of the inputs; any other is an error. It contains

    job.json      the identity of the job; written last, so a job that has it is planned
    plan.json     the map tasks: lists of units
    datasets/     data of builders, by a fingerprint of their arguments
    tokenizer/    the tokenizer that all map tasks use
    lines/00000/  hashes of the lines of a map task's texts
    map/00000/    the output of a finished map task
    dedup/        merged hash tables, candidate pairs, repeated lines, and the duplicates that were found
    merge/        merged runs, in jobs of very many runs
    reduce/       markers of finished shards
    out/          the shards; becomes the output. For an output in an object store, the files uploaded at the end
    phases/       plans that all shares of a phase use, see `saved_plans.py`
    progress/     the status notes of the processes
    running/      task claims and heartbeats of workers on several machines
    lock          shared by processes that run a share of a phase, exclusive for all other processes

`.headrace-tokenizers/` beside it stays: all jobs whose outputs have this parent find tokenizers there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from data_prep.config.corpus import CorpusConfig, Source, changed_fields
from data_prep.sources.units import Unit
from data_prep.task import SCRATCH
from data_prep.tasks.make_tokenizer import TokenizerTask, tokenizer_folder
from data_prep.tasks.map import MapTask
from data_prep.tasks.sorted_runs import task_directory
from foundation.directory import fingerprint_of, sync, write_json
from foundation.errors import DataError
from foundation.lock import lock_file
from foundation.paths import is_store_url
from foundation.remote_directory import find_manifest
from foundation.remote_output import local_output

FORMAT = 4
"""Version of the tasks' results and of their files for other tasks; a job with another version is not resumed.

Raise it when the same config and inputs would give other bytes. It is independent of the package's version.
"""


@dataclass(frozen=True)
class Job:
    """The paths of a job and its config."""

    config: CorpusConfig

    @property
    def output(self) -> Path:
        """The tokens directory that the job makes; for a URL, a local path that only names the job directory."""
        return local_output(self.config.output)

    @property
    def url(self) -> str | None:
        """URL of an output in an object store, to which finished shards are uploaded (`uploads.py`); None otherwise."""
        return self.config.output if is_store_url(self.config.output) else None

    @property
    def has_output(self) -> bool:
        """Whether the output's name is in use, on a disk or in the object store."""
        return self.output.exists() if self.url is None else find_manifest(self.url) is not None

    @property
    def root(self) -> Path:
        """The job directory: beside the output, so that the last step is a rename."""
        return self.output.parent / f".{self.output.name}.job"

    @property
    def out(self) -> Path:
        """The directory of the shards, which is renamed to the output at the end."""
        return self.root / "out"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer task's directory."""
        return self.root / "tokenizer"

    @property
    def trained_tokenizers(self) -> Path:
        """The store of tokenizers trained by jobs with outputs beside this one, see `data_prep.tokenizer.store`."""
        return self.output.parent / ".headrace-tokenizers"

    def dataset(self, source: Source) -> Path:
        """Directory in which the data of a builder is saved."""
        arguments = {"builder": source.builder, "split": source.split, "kwargs": source.kwargs}
        return self.root / "datasets" / fingerprint_of(arguments)[:16]

    def map_directory(self, index: int) -> Path:
        """The result directory of map task `index`."""
        return task_directory(self.maps, index)

    @property
    def maps(self) -> Path:
        """The parent of the map tasks' directories."""
        return self.root / "map"

    def reduce_marker(self, split: str, index: int) -> Path:
        """The marker of a finished shard."""
        return self.root / "reduce" / f"{split}-{index:05d}.json"

    def tokenizer_task(self, plan: list[list[Unit]]) -> TokenizerTask:
        """The task that makes the tokenizer."""
        every_unit = [unit for units in plan for unit in units]
        return TokenizerTask(every_unit, self.config, self.tokenizer, self.trained_tokenizers)

    @property
    def dedup(self) -> Path:
        """The parent of the deduplication tasks' directories."""
        return self.root / "dedup"

    @property
    def duplicates(self) -> Path:
        """The result directory of the components task: the decision for each document."""
        return self.dedup / "copies"

    @property
    def merges(self) -> Path:
        """The parent of the merge tasks' directories."""
        return self.root / "merge"

    @property
    def plans(self) -> Path:
        """The saved plans of phases, see `saved_plans.py`."""
        return self.root / "phases"

    def lines_directory(self, index: int) -> Path:
        """The directory with the hashes of map task `index`'s lines."""
        return self.root / "lines" / f"{index:05d}"

    def map_tasks(self, plan: list[list[Unit]], lines: list[Path]) -> list[MapTask]:
        """All map tasks, in order; `lines`: directories of the tasks that found repeated lines."""
        folder = tokenizer_folder(self.tokenizer)
        return [MapTask(i, units, self.config, folder, self.map_directory(i), lines) for i, units in enumerate(plan)]

    def save_plan(self, plan: list[list[Unit]], identity: dict[str, Any]) -> None:
        """Writes plan.json, then job.json."""
        self.write_plan(plan)
        heldout = ["out/heldout"] if self.config.has_heldout else []
        for sub in ("lines", "map", "dedup", "merge", "reduce", "out/train", *heldout):
            (self.root / sub).mkdir(parents=True, exist_ok=True)
        sync(self.root / "out")
        sync(self.root)  # after a power failure too, a job with job.json has a plan and these directories
        write_json(self.root / "job.json", identity)
        sync(self.root)

    def write_plan(self, plan: list[list[Unit]]) -> None:
        """Writes plan.json and flushes it to disk before any task that depends on it."""
        partial = self.root / ".plan.json.partial"
        partial.write_text(json.dumps([[astuple(unit) for unit in units] for units in plan]))
        sync(partial)
        partial.rename(self.root / "plan.json")

    def load_plan(self) -> list[list[Unit]]:
        """Reads plan.json.

        Raises:
            DataError: it is missing or damaged.
        """
        path = self.root / "plan.json"
        try:
            plan = [[_unit(*unit) for unit in units] for units in json.loads(path.read_bytes())]
            if not all(plan) or not plan:
                raise ValueError("it has no tasks, or one without input")
        except (OSError, ValueError, TypeError) as error:
            raise self._damaged(path, error) from None
        return plan

    def saved_identity(self) -> dict[str, Any] | None:
        """The content of job.json, or None if the planning of the job was not finished.

        Raises:
            DataError: it is damaged.
        """
        path = self.root / "job.json"
        try:
            saved: dict[str, Any] = json.loads(path.read_bytes())
            if not isinstance(saved, dict) or not isinstance(saved.get("config"), dict) or "inputs" not in saved:
                raise ValueError("it is not the identity of a job")
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise self._damaged(path, error) from None
        return saved

    def _damaged(self, path: Path, error: Exception) -> DataError:
        return DataError(f"{path} is damaged: {error}\n  try: rm -r {self.root} to start the job over")

    def check_identity(self, identity: dict[str, Any], saved: dict[str, Any], *, changes: str = "") -> None:
        """Checks that the job directory was made with the same config, inputs and format.

        Args:
            changes: description of changed inputs, appended to the message.

        Raises:
            DataError: they differ; the message names the keys. Keys that only `saved` has are not compared.
        """
        found = sorted(key for key in identity if key != "config" and identity[key] != saved.get(key))
        found += changed_fields(identity["config"], saved["config"])
        if found:
            raise DataError(
                f"{self.root} has an unfinished job with other settings or inputs; "
                f"these differ: {', '.join(found)}{changes}\n"
                f"  try: rm -r {self.root} to start over, or undo the changes to resume it"
            )

    def clear(self) -> None:
        """Deletes the files of a job that was never planned or partly removed. Needs the exclusive lock."""
        for path in self.root.iterdir():
            if path.name not in ("lock", "datasets"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def remove(self) -> None:
        """Deletes the job directory, job.json first: if interrupted, the rest is no longer a planned job."""
        with suppress(OSError):  # a slower attempt at a task, on a suspended machine, may still write there
            (self.root / "job.json").unlink(missing_ok=True)
            shutil.rmtree(self.root)

    def remove_scratch(self) -> None:
        """Deletes the scratch files of killed tasks. Needs the exclusive lock."""
        for parent in (self.root, *(self.root / sub for sub in ("lines", "map", "dedup", "merge", "reduce"))):
            for path in parent.glob(SCRATCH):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """Holds the lock of the job directory, exclusively unless `shared`.

        Raises:
            DataError: another process holds it.
        """
        with lock_file(self.root / "lock", doing=f"working in {self.root}", shared=shared) as handle:
            if not _is_same_file(handle, self.root / "lock"):
                raise DataError(f"{self.root} was just finished or removed by another process\n  try: run again")
            yield


def _unit(*fields: Any) -> Unit:
    unit = Unit(*fields)
    if [type(field) for field in fields] != _UNIT_TYPES:
        raise TypeError(f"{fields} is not a unit")
    return unit


_UNIT_TYPES = [str, str, str, str, int, int, int, int, int, int, int, str]


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def job_identity(
    config: CorpusConfig, *, listing: str, tokenizer: str | None, cleaning: dict[str, Any] | None
) -> dict[str, Any]:
    """The identity of a job: everything its output depends on.

    Args:
        listing: fingerprint of the inputs' names and sizes.
        tokenizer: fingerprint of the given tokenizer's files, or None.
        cleaning: dependencies of the cleaning steps besides the config (`cleaning_identity`), or None.
    """
    given = {"inputs": listing, "tokenizer": tokenizer, "cleaning": cleaning}
    return {"format": FORMAT, "config": config.identity(), **given}
