"""The job directory: what is finished so far, beside the output, until the output is there.

`.NAME.job/` belongs to one config and one listing of the inputs; with another it is refused. It holds

    job.json      what it belongs to, and the counts of the plan; written last, so a job with it is planned
    plan.json     the map tasks: lists of units
    datasets/     data of builders, by what was asked of them
    tokenizer/    the tokenizer that all map tasks use
    lines/00000/  hashes of the lines of a map task's texts
    map/00000/    the output of a finished map task
    dedup/        hashes of many runs, put together; pairs and copies that were found in them
    merge/        runs that were merged, where there are very many
    reduce/       markers of finished shards
    out/          the shards; becomes the output
    lock          held by whoever works on it: shared by map tasks, alone by everybody else
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
from headrace import __version__
from headrace.base.directory import fingerprint_of, write_json
from headrace.base.errors import DataError
from headrace.base.lock import lock_file

_FORMAT = 3
"""Of what tasks leave for one another. One higher with each change: no job is resumed by other code."""


@dataclass(frozen=True)
class Job:
    """The paths of a job and its config."""

    config: CorpusConfig

    @property
    def output(self) -> Path:
        """The tokens directory to be."""
        return Path(self.config.output)

    @property
    def root(self) -> Path:
        """The job directory: beside the output, so that the last step is a rename."""
        return self.output.parent / f".{self.output.name}.job"

    @property
    def out(self) -> Path:
        """Where shards are put until the output gets its name."""
        return self.root / "out"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer task's directory."""
        return self.root / "tokenizer"

    def dataset(self, source: Source) -> Path:
        """Where the data of a builder is saved."""
        asked = {"builder": source.builder, "split": source.split, "kwargs": source.kwargs}
        return self.root / "datasets" / fingerprint_of(asked)[:16]

    def map_directory(self, index: int) -> Path:
        """Where map task `index` leaves its result."""
        return task_directory(self.maps, index)

    @property
    def maps(self) -> Path:
        """Where the directories of the map tasks are."""
        return self.root / "map"

    def reduce_marker(self, split: str, index: int) -> Path:
        """The marker of a finished shard."""
        return self.root / "reduce" / f"{split}-{index:05d}.json"

    def tokenizer_task(self, plan: list[list[Unit]]) -> TokenizerTask:
        """The task that makes the tokenizer."""
        return TokenizerTask([unit for units in plan for unit in units], self.config, self.tokenizer)

    @property
    def dedup(self) -> Path:
        """What deduplication has found."""
        return self.root / "dedup"

    @property
    def copies(self) -> Path:
        """Which documents are copies of others."""
        return self.dedup / "copies"

    @property
    def merges(self) -> Path:
        """Where merged runs are."""
        return self.root / "merge"

    def lines_directory(self, index: int) -> Path:
        """Where the hashes of map task `index`'s lines are."""
        return self.root / "lines" / f"{index:05d}"

    def map_tasks(self, plan: list[list[Unit]], lines: list[Path]) -> list[MapTask]:
        """All map tasks, in order; `lines`: directories of the tasks that have found lines to drop."""
        folder = tokenizer_folder(self.tokenizer)
        return [MapTask(i, units, self.config, folder, self.map_directory(i), lines) for i, units in enumerate(plan)]

    def save_plan(self, plan: list[list[Unit]], identity: dict[str, Any]) -> None:
        """Writes plan.json, then job.json."""
        partial = self.root / ".plan.json.partial"
        partial.write_text(json.dumps([[astuple(unit) for unit in units] for units in plan]))
        partial.rename(self.root / "plan.json")
        for sub in ("lines", "map", "dedup", "merge", "reduce", "out/train", "out/heldout"):
            (self.root / sub).mkdir(parents=True, exist_ok=True)
        write_json(self.root / "job.json", identity)

    def load_plan(self) -> list[list[Unit]]:
        """Reads plan.json."""
        return [[Unit(*unit) for unit in units] for units in json.loads((self.root / "plan.json").read_text())]

    def saved_identity(self) -> dict[str, Any] | None:
        """What job.json says, or None when the job was not planned to the end."""
        try:
            saved: dict[str, Any] = json.loads((self.root / "job.json").read_text())
        except FileNotFoundError:
            return None
        return saved

    def check_same(self, identity: dict[str, Any], saved: dict[str, Any]) -> None:
        """Refuses a job directory of another config, other inputs or another version of the code.

        Raises:
            DataError: with what differs. Keys of `identity` that are missing in it are not compared.
        """
        found = sorted(key for key in identity if key != "config" and identity[key] != saved.get(key))
        found += changed_fields(identity["config"], saved["config"])
        if found:
            raise DataError(
                f"{self.root} holds a half-done job of another making; these differ: {', '.join(found)}\n"
                f"  try: rm -r {self.root} to start over, or put back what was changed to resume it"
            )

    def clear(self) -> None:
        """Deletes what a job that was never planned, or was half removed, has left. For who holds the lock alone."""
        for path in self.root.iterdir():
            if path.name not in ("lock", "datasets"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def remove(self) -> None:
        """Deletes the job directory; what is left when that is interrupted is no job any more."""
        with suppress(OSError):  # a copy of a task on a frozen machine may still write there
            (self.root / "job.json").unlink(missing_ok=True)
            shutil.rmtree(self.root)

    def remove_scratch(self) -> None:
        """Deletes what killed tasks left. Only for who holds the lock alone."""
        for parent in (self.root, *(self.root / sub for sub in ("lines", "map", "dedup", "merge", "reduce"))):
            for path in parent.glob(SCRATCH):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """Holds the job directory's lock.

        Raises:
            DataError: somebody else holds it.
        """
        with lock_file(self.root / "lock", doing=f"working in {self.root}", shared=shared) as handle:
            if not _still_there(handle, self.root / "lock"):
                raise DataError(f"{self.root} was just finished or removed by another process\n  try: run again")
            yield


def _still_there(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def identity_of(
    config: CorpusConfig, *, listing: str, tokenizer: str | None, cleaning: dict[str, Any] | None
) -> dict[str, Any]:
    """What a job directory belongs to.

    Args:
        listing: fingerprint of the inputs' names and sizes. tokenizer: of the given tokenizer's files.
        cleaning: what the cleaning steps depend on besides the config.
    """
    given = {"inputs": listing, "tokenizer": tokenizer, "cleaning": cleaning}
    return {"headrace": __version__, "format": _FORMAT, "config": config.identity(), **given}
