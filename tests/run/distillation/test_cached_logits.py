"""Cached logits: a student learns from them what it learns from the teacher, in any layout, or they are refused."""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data_prep.formats.memory_map import map_file
from foundation.directory import read_manifest, verify
from pipeline.config.load import read_config
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.data import DataSection
from pipeline.data.micro_batch import MicroBatch, make_batch
from pipeline.data.mixing_weights import Extent, make_order
from pipeline.data.mixture import open_mixture
from pipeline.run.distillation.cached_logits import CachedLogits
from pipeline.run.distillation.divergence import log_probabilities
from pipeline.run.distillation.find_teacher import open_teacher
from pipeline.run.distillation.open_logits import steps_of_all
from pipeline.run.distillation.teacher import Teacher
from pipeline.run.distillation.write_logits import LogitsPlan, drawn_windows, write_logits
from tests.conftest import launch, losses, make_tokens, start, write_config
from tests.run.distillation.test_layouts import STEPS, student
from tests.support import refusal_of

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
    [
        ("parallel.tp=2",),
        pytest.param(("parallel.cp=2", "zero_optimization.stage=2"), marks=pytest.mark.sweep),
        ("engine=deepspeed",),
        pytest.param(("engine=deepspeed", "parallel.pp=2", "zero_optimization.stage=1"), marks=pytest.mark.sweep),
    ],
    ids=["tensor parallelism", "context parallelism", "DeepSpeed, data parallelism", "DeepSpeed, pipeline"],
)
def test_every_layout_follows_one_process_on_the_same_logits(work: Path, tmp_path: Path, sets: tuple[str, ...]) -> None:
    launch("distill.py", work / "c.json", f"run.dir={tmp_path / 'alone'}")
    launch("distill.py", work / "c.json", f"run.dir={tmp_path / 'two'}", *sets, processes=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "alone"), rel=2e-5)


def test_another_seed_and_mixture_find_the_records_of_their_samples(work: Path) -> None:
    """A record belongs to a window of a dataset, however a run comes to draw it: the teacher says the same of it."""
    run = resolve(read_config(work / "c.json", ["distill.logits=null"]).config, world_size=1)
    data, logits = run.config.data, CachedLogits(work / "logits", read_manifest(work / "logits", kind="logits"), [0, 0])
    have = drawn_windows(open_mixture(data, seed=run.config.run.seed).order, 8 * STEPS)[0]
    blend = data.model_copy(update={"sources": [data.sources[0].model_copy(update={"weight": w}) for w in (1.0, 3.0)]})
    other = open_mixture(blend, seed=8)
    samples = np.arange(2000)
    samples = samples[np.isin(other.order.locate(samples).window, have)][:6]
    assert samples.size == 6
    location = other.order.locate(samples)
    assert set(location.source.tolist()) == {0, 1}
    batch = make_batch(other.rows(location), other.boundaries(samples))
    teacher = Teacher(open_teacher(run, vocab_size=512), run, device=torch.device("cpu"), mesh=None)
    log_p = log_probabilities(torch.cat(list(teacher.logits(batch))), 2.0).view(6, 32, 512)
    ids, logs = (torch.from_numpy(each) for each in logits.read(location))
    said = log_p.gather(-1, ids.long())
    torch.testing.assert_close(logs[..., :-1].float(), said, rtol=2**-10, atol=1e-3)
    assert torch.equal(ids.sort(-1).values, torch.arange(512, dtype=torch.int32).expand_as(ids))


def test_a_killed_job_goes_on_in_any_number_of_processes_and_writes_the_same_bytes(work: Path, tmp_path: Path) -> None:
    run = resolve(read_config(work / "c.json", ["distill.logits=null"]).config, world_size=1)
    mixture = open_mixture(run.config.data, seed=run.config.run.seed)
    made = CachedLogits(work / "logits", read_manifest(work / "logits", kind="logits"), [0])
    layout = replace(made.format, records_per_file=7)
    plan = LogitsPlan(layout, tuple(mixture.sources), drawn_windows(mixture.order, 8 * STEPS))
    teacher = Teacher(open_teacher(run, vocab_size=512), run, device=torch.device("cpu"), mesh=None)
    final, left = tmp_path / "logits", [5]

    def killed_soon(batch: MicroBatch) -> Iterator[Tensor]:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return teacher.logits(batch)

    where: dict[str, Any] = {"batch": 4, "parents": {}, "say": str}
    with pytest.raises(KeyboardInterrupt):
        write_logits(plan, final, killed_soon, **where)
    assert not final.exists()
    assert len(list(tmp_path.glob(".logits.*.partial/*.logits"))) == 2  # of 2 batches each
    assert not write_logits(plan, final, teacher.logits, **where, rank=1, processes=2)
    assert write_logits(plan, final, teacher.logits, **where, rank=0, processes=2)
    manifest = read_manifest(final, kind="logits")
    assert all(whole for _, whole in verify(final, manifest))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["logits"]
    files = sorted(name for name in manifest.files if name.endswith(".logits"))
    records = np.concatenate([map_file(final / name).view(layout.record) for name in files])
    expected = map_file(work / "logits/source-0-00000.logits").view(layout.record)
    assert np.array_equal(records["ids"][:, :, 0], expected["ids"][:, :, 0])
    # another batch is another order of summation: a log-probability may be rounded to fp16's neighbour
    assert np.abs(records["logs"][..., :-1].astype(np.float64) - expected["logs"][..., :-1]).max() < 2**-5


def refusal(work: Path, *sets: str) -> str:
    said = refusal_of(start("distill.py", work / "c.json", f"run.dir={work / 'refused'}", *sets))
    assert not (work / "refused").exists()
    return said


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("data.sequence_length=16",), "were made with 32"),
        (("data.mask_documents=false",), "were made with True"),
        (("distill.temperature=1.0",), "were made with 2.0"),
        (("run.steps=60",), "which the run draws"),
        (("model.config.vocab_size=640",), "were made with 512"),
        (("distill.shard_teacher=true",), "no teacher is in memory"),
        (("data.fim.rate=0.5",), "rearranges"),
        (("anomalies.spikes=rollback",), "headrace cache-logits --set run.steps="),
        (("anomalies.non_finite=rollback",), "anomalies.non_finite = 'rollback'"),
    ],
)
def test_a_run_that_the_logits_do_not_fit_is_told_what_they_are(work: Path, sets: tuple[str, ...], words: str) -> None:
    assert words in refusal(work, *sets)


def test_logits_of_another_tokenizer_and_of_other_text_are_refused(work: Path, tokens: Path, tmp_path: Path) -> None:
    text = [Path(sysconfig.get_paths()["stdlib"]) / "email"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    retokenized = make_tokens(tmp_path / "a", text, tokenizer={"train": "bpe", "vocab_size": 512}, seed=4)
    other = make_tokens(tmp_path / "b", text, tokenizer={"path": str(tokens / "tokenizer")})
    online = ["distill.teacher=null"]  # whose tokenizer is compared, too
    assert "another tokenizer" in refusal(work, f"data.sources.0.path={retokenized}", *online)
    assert "has no logits of" in refusal(work, f"data.sources.0.path={other}", *online)
    output = refusal_of(
        start("cache_logits.py", work / "c.json", f"data.sources.0.path={retokenized}", f"distill.logits={tmp_path}/c")
    )
    assert "its tokenizer is not the one the dataset was made with" in output
    assert not list(tmp_path.glob("*c*"))


def test_logits_of_another_teacher_are_refused_and_damage_is_found(work: Path, teacher: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(teacher, tmp_path / "teacher")
    (copy / "manifest.json").unlink()  # without it the files themselves are looked at
    assert "made by another teacher" in refusal(work, f"distill.teacher={copy}")
    cut = shutil.copytree(work / "logits", tmp_path / "logits")
    with (cut / "source-0-00000.logits").open("r+b") as file:
        file.truncate(1000)
    assert "truncated" in refusal(work, f"distill.logits={cut}")
    output = refusal_of(start("cache_logits.py", work / "c.json", "distill.top_k=3"))
    assert "holds logits of another teacher, data or format" in output


def test_a_run_on_cached_logits_needs_no_teacher(work: Path, tmp_path: Path) -> None:
    launch("distill.py", work / "c.json", f"run.dir={tmp_path / 'run'}", "distill.teacher=null")
    assert read_manifest(tmp_path / "run", kind="run").parents.keys() >= {"distill.logits"}


@pytest.mark.sweep
def test_a_cache_of_all_windows_allows_rollbacks(work: Path, tmp_path: Path) -> None:
    """The remedy of the refusal: with so many steps, the cache has all windows."""
    steps = re.search(r"run\.steps=(\d+)", refusal(work, "anomalies.spikes=rollback"))
    everything, small = f"distill.logits={tmp_path / 'all'}", "distill.top_k=2"
    launch("cache_logits.py", work / "c.json", everything, small, f"run.steps={steps[1]}")
    [source] = read_manifest(tmp_path / "all", kind="logits").details["sources"]
    assert source["records"] == source["windows"]
    launch("distill.py", work / "c.json", everything, f"run.dir={tmp_path / 'run'}", "anomalies.spikes=rollback")


def curriculum_of(*stages: tuple[int, float, float]) -> DataSection:
    """A section with two sources, of whose curriculum the stages are (after_step, weight, weight)."""
    sources = [{"path": "a", "name": "a"}, {"path": "b", "name": "b"}]
    curriculum = [{"after_step": step, "weights": {"a": a, "b": b}} for step, a, b in stages]
    return DataSection.model_validate({"sources": sources, "sequence_length": 32, "curriculum": curriculum})


def test_the_steps_that_draw_all_windows_are_named_where_there_are_any() -> None:
    def steps(data: DataSection, length: int = 4) -> int | None:
        order = make_order(data, [20, 10], seed=1, extent=Extent(length, 8))
        return steps_of_all(data, order, samples=8)

    assert steps(curriculum_of((0, 1, 1))) == 5
    assert steps(curriculum_of((0, 1, 1), (2, 1, 0))) is None  # 8 of the 10 windows of b, and no more
    assert steps(curriculum_of((0, 1, 1), (3, 1, 0))) == 4
    sources: list[dict[str, Any]] = [{"path": "a"}, {"path": "b", "weight": 1, "max_epochs": 1}]
    repeated = DataSection.model_validate({"sources": sources, "sequence_length": 32})
    assert steps(repeated, 2) is None  # one would be repeated until the other is whole
    budget = DataSection.model_validate(
        {"sources": [{"path": "a"}, {"path": "b", "epochs": 0.5}], "sequence_length": 32}
    )
    assert steps(budget) is None


def test_a_dataset_that_a_mixture_names_twice_is_written_once_with_the_windows_of_both_places(
    work: Path, tokens: Path, tmp_path: Path
) -> None:
    sources = [{"path": str(tokens), "name": name, "weight": 1.0} for name in ("a", "b")]
    twice = f"data.sources={json.dumps(sources)}"
    made, run_dir = f"distill.logits={tmp_path / 'logits'}", f"run.dir={tmp_path / 'run'}"
    launch("cache_logits.py", work / "c.json", twice, made)
    [source] = read_manifest(tmp_path / "logits", kind="logits").details["sources"]
    run = resolve(read_config(work / "c.json", [twice]).config, world_size=1)
    own, other = drawn_windows(open_mixture(run.config.data, seed=run.config.run.seed).order, 8 * STEPS)
    assert len(own) < source["records"] == len({*own.tolist(), *other.tolist()})
    launch("distill.py", work / "c.json", twice, made, run_dir)
    launch("distill.py", work / "c.json", twice, f"run.dir={tmp_path / 'online'}", "distill.logits=null")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "online"), rel=FP16)


def test_a_longer_run_resumes_on_a_cache_of_more_steps_and_on_no_other(work: Path, tmp_path: Path) -> None:
    constant, run_dir = "scheduler=null", f"run.dir={tmp_path / 'run'}"
    launch("distill.py", work / "c.json", run_dir, constant)
    longer = f"run.steps={STEPS + 4}"
    assert "which the run draws" in start("distill.py", work / "c.json", run_dir, constant, longer).stdout
    for name, more in (("more", ()), ("others", ("distill.top_k=3",))):
        made = f"distill.logits={tmp_path / name}"
        launch("cache_logits.py", work / "c.json", longer, made, *more)
    output = refusal_of(
        start("distill.py", work / "c.json", run_dir, constant, longer, f"distill.logits={tmp_path / 'others'}")
    )
    assert "distill.logits (fingerprint): was" in output
    launch("distill.py", work / "c.json", run_dir, constant, longer, f"distill.logits={tmp_path / 'more'}")
    assert len(losses(tmp_path / "run")) == STEPS + 4


def test_files_of_a_teacher_in_another_dtype_do_not_fit_together(work: Path) -> None:
    made = CachedLogits(work / "logits", read_manifest(work / "logits", kind="logits"), [0])
    assert made.format.dtype == "float32"
    plans = [LogitsPlan(replace(made.format, dtype=dtype), (), ()) for dtype in ("float32", "bfloat16")]
    assert plans[0].fingerprint != plans[1].fingerprint
    assert plans[0].format.content != plans[1].format.content


def test_a_student_of_another_vocabulary_is_refused_before_the_teacher_runs(work: Path, tmp_path: Path) -> None:
    config = ("model.config.vocab_size=640", f"distill.logits={tmp_path / 'logits'}")
    assert "the teacher has 512 ids, the student 640" in refusal_of(start("cache_logits.py", work / "c.json", *config))
    assert not list(tmp_path.iterdir())
