"""Cached logits: a student learns from them what it learns from the teacher, in any layout, or they are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.formats.memory_map import map_file
from headrace.base.directory import read_manifest, verify
from pipeline.data.mixture import open_mixture
from pipeline.data.order import SampleLocation
from pipeline.distillation.cached_logits import CachedLogits
from pipeline.distillation.write_logits import drawn_windows
from tests import warm
from tests.conftest import launch, losses, read_config_file, start, tiny_config, write_config
from tests.distillation.test_layouts import STEPS, student

FP16 = 2e-4
"""Relative, of losses: log-probabilities in fp16 are rounded by up to 2^-9 where they are below -4."""


@pytest.fixture(scope="module")
def work(teacher: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with c.json, a distillation on cached logits, and the logits with all 512 ids."""
    work = tmp_path_factory.mktemp("cached")
    fields = {"logits": str(work / "logits"), "top_k": 512, "divergence": "jsd"}
    config = write_config(work / "c.json", student(tokens, work / "run", teacher, **fields))
    said = launch("cache_logits.py", config, processes=2)
    assert "2050 bytes each (512 ids and the rest)" in said
    return work


def test_with_all_ids_a_student_learns_what_it_learns_from_the_teacher(work: Path, tmp_path: Path) -> None:
    launch("distill.py", work / "c.json", f"run.dir={tmp_path / 'cached'}")
    launch("distill.py", work / "c.json", f"run.dir={tmp_path / 'online'}", "distill.logits=null")
    cached = losses(tmp_path / "cached")
    assert len(cached) == STEPS
    assert cached == pytest.approx(losses(tmp_path / "online"), rel=FP16)


@pytest.mark.integration
@pytest.mark.parametrize(
    "sets",
    [("parallel.tp=2",), ("parallel.cp=2", "zero_optimization.stage=2"), ("engine=deepspeed",)],
    ids=["tensor parallelism", "context parallelism", "DeepSpeed, data parallelism"],
)
def test_every_layout_follows_one_process_on_the_same_logits(
    work: Path, tmp_path: Path, sets: tuple[str, ...]
) -> None:
    launch("distill.py", work / "c.json", f"run.dir={tmp_path / 'alone'}")
    launch("distill.py", work / "c.json", f"run.dir={tmp_path / 'two'}", *sets, processes=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "alone"), rel=2e-5)


def test_another_batch_size_seed_and_mixture_find_the_same_records(work: Path, tokens: Path) -> None:
    """A record belongs to a window of a dataset, however a run comes to draw it."""
    manifest = read_manifest(work / "logits", kind="logits")
    logits = CachedLogits(work / "logits", manifest, [0])
    data = read_config_file(work / "c.json").data
    twice = data.model_copy(update={"sources": [data.sources[0].model_copy(update={"weight": w}) for w in (1.0, 3.0)]})
    have = set(drawn_windows(open_mixture(data, seed=7).order, 8 * STEPS)[0].tolist())
    again = open_mixture(twice, seed=8)
    location = again.order.locate(np.arange(4000))
    known = np.array([window in have for window in location.window.tolist()])
    assert known.sum() > 100
    chosen = SampleLocation(location.source[known] * 0, location.window[known])
    ids, logs = logits.read(chosen)
    records = {window: (ids[row], logs[row]) for row, window in enumerate(chosen.window.tolist())}
    for window, (its_ids, its_logs) in records.items():
        one_ids, one_logs = logits.read(SampleLocation(np.zeros(1, dtype=np.int64), np.array([window])))
        assert np.array_equal(one_ids[0], its_ids)
        assert np.array_equal(one_logs[0], its_logs)
    sums = np.exp(logs.astype(np.float64)).sum(-1)
    assert np.abs(sums - 1).max() < 2e-3


def test_the_files_are_those_of_one_process_and_of_a_job_that_was_killed(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_manifest(work / "logits", kind="logits")
    final = tmp_path / "logits"
    first = start("cache_logits.py", work / "c.json", f"distill.logits={final}", arguments=("--part", "1/2"))
    del monkeypatch, first, final, expected


def refusal(work: Path, *sets: str) -> str:
    """What a run with these settings is refused with."""
    done = start("distill.py", work / "c.json", f"run.dir={work / 'refused'}", *sets)
    assert done.returncode == 2, done.stdout
    assert not (work / "refused").exists()
    return done.stdout


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("data.sequence_length=16",), "were made with 32"),
        (("data.mask_documents=false",), "were made with True"),
        (("distill.temperature=1.0",), "were made with 2.0"),
        (("run.steps=60",), "which the run draws"),
        (("model.config.vocab_size=640",), "were made with 512"),
        (("distill.shard_teacher=true",), "no teacher is in memory"),
        (('data.fim={"rate": 0.5}',), "rearranges"),
    ],
)
def test_a_run_that_the_logits_do_not_fit_is_refused_with_what_they_are(
    work: Path, sets: tuple[str, ...], words: str
) -> None:
    assert words in refusal(work, *sets)
