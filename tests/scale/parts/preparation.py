"""Data prep of 100,000 input files in 10,000 tasks: listing and plan, waiting for tasks, what is kept per document."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from data_prep.config.corpus import CorpusConfig
from data_prep.dedup.components import ComponentsTask
from data_prep.dedup.document_tasks import RANK
from data_prep.dedup.table import PAIRS
from data_prep.job import phases, prepare
from data_prep.job.directory import Job
from data_prep.job.planning import ignore_progress
from data_prep.job.share import _others_finished
from data_prep.sources.units import Unit
from foundation.errors import DataError
from foundation.section import parse
from tests.scale.measuring import Figures, Part, measured

_SHARE_S = 8.0


def _config(work: Path) -> CorpusConfig:
    sources = [{"path": str(work / "in"), "name": "web"}]
    tokenizer = {"train": "bpe", "vocab_size": 300}
    return parse(CorpusConfig, {"sources": sources, "output": str(work / "out"), "tokenizer": tokenizer})


def listed(files: int, work: Path) -> Figures:
    """The inputs are found, their identity and the plan are made, written and read."""
    for number in range(files):
        folder = work / "in" / f"{number // 1000:03}"
        if number % 1000 == 0:
            folder.mkdir(parents=True)
        (folder / f"{number:06}.txt").write_text("some text\n")
    config = _config(work)
    with measured() as figures:
        inspected = prepare.inspect(config)
        plan = inspected.plan_map_tasks()
        inspected.job.root.mkdir()
        inspected.job.write_plan(plan)
        assert sum(map(len, inspected.job.load_plan())) == files
    return figures


def _job(tasks: int, work: Path) -> Job:
    (work / "in").mkdir()
    (work / "in" / "a.txt").write_text("some text\n")
    job = Job(_config(work))
    job.root.mkdir(parents=True)
    path = str(work / "in" / "a.txt")
    unit = Unit(
        "web", "text", "a.txt", path, 0, 10, first_group=0, end_group=0, part=0, parts=1, file_bytes=10, file_version=""
    )
    job.save_plan([[unit]] * tasks, {})
    return job


def waiting(tasks: int, work: Path) -> Figures:
    """A share of a job waits for the map tasks of the others during a minute; none of them has finished."""
    job = _job(tasks, work)
    job.tokenizer.mkdir(parents=True)
    (phase,) = [each for each in phases.phases_of(job.config) if each.name == "map"]
    threading.Timer(_SHARE_S, lambda: shutil.rmtree(job.root)).start()
    with measured() as figures, pytest.raises(DataError, match="has been removed"):
        _others_finished(job, phase)
    return figures.times(60 / figures.seconds)


def components(documents: int, work: Path) -> Figures:
    """Documents in pairs of near duplicates, five of each text; decided in one process."""
    rng = np.random.default_rng(0)
    run, pairs = work / "run", work / "pairs"
    run.mkdir()
    pairs.mkdir()
    np.save(run / RANK, rng.permutation(documents))
    numbers = np.arange(documents, dtype="<i8")
    np.stack([numbers - numbers % 5, numbers], axis=1)[numbers % 5 > 0].tofile(pairs / PAIRS)
    task = ComponentsTask((), (pairs,), [run], work / "found")
    with measured() as figures:
        done = task.run(ignore_progress)
    assert done["near"] == documents - -(-documents // 5)
    return figures


PARTS = [
    Part(
        "data prep: listing and plan",
        "all input files are found, checked, and divided into tasks; the plan is written and read.",
        "files",
        (6250, 12_500, 25_000, 50_000),
        100_000,
        listed,
        note="This is one operation per file, once per job.",
    ),
    Part(
        "data prep: waiting",
        "during a minute a share of a job waits for the other shares' map tasks.",
        "tasks",
        (1250, 2500, 5000, 10_000),
        10_000,
        waiting,
    ),
    Part(
        "data prep: near duplicates",
        "one process finds the connected components of all pairs. Only this phase keeps data for each document in a"
        " pair, here a tenth of 10^9.",
        "documents",
        (250_000, 500_000, 1_000_000, 2_000_000),
        100_000_000,
        components,
        note="A job of 10^9 documents takes days; this task takes minutes.",
    ),
]
