"""Tasks in training and on one rank: the exported model's figures, no step evaluated twice, runs that end early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MambaConfig

from foundation.errors import ConfigError
from foundation.task_figures import figures_line, with_interval
from pipeline.config.sections.evaluation import TaskSection
from pipeline.evaluation.tasks.encode import EncodedTask
from pipeline.evaluation.tasks.rows import GeneratedQuestion, RankedQuestion
from pipeline.models.card.front_matter import front_matter_of
from pipeline.models.construction.meta import build_meta
from pipeline.run.task_evaluation import TaskEvaluation, check_tasks
from pipeline.runtime.metrics.journal import read_rows
from tests import warm, warm_python
from tests.conftest import launch, losses, start, tiny_config, warm_command, write_config
from tests.engines.layout_worker import CPU, VOCABULARY, make_engine, resolved
from tests.evaluation.tasks.test_encode import questions, write
from tests.support import output_of, refusal_of, wait_until


def config_of(work: Path, tokens: Path, *, prompts: int = 5, **keys: Any) -> Path:
    ranked = write(work / "mills.jsonl", *questions())
    texts = [f"The mill at race {n} turns{' often' * (n % 5)}" for n in range(prompts)]
    rows = [{"prompt": text, "answers": [" times"]} for text in texts]
    generated = {"file": str(write(work / "prompts.jsonl", *rows)), "new_tokens": 6, "match": "contains"}
    evaluation = {"every": 4, "samples": 2, "tasks": [{"file": str(ranked)}, generated]}
    config = tiny_config(tokens, work / "run", evaluation=evaluation, scheduler=None, **keys)
    config["data"]["sequence_length"] = 48
    config["run"] |= {"steps": 8, "checkpoint_every": 4}
    return write_config(work / "c.json", config)


def rows_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return read_rows(run_dir, kind=f"task/{name}")


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on two ranks with ZeRO-3 by DeepSpeed: its directory, and what it printed."""
    work = tmp_path_factory.mktemp("run")
    output = launch("train.py", config_of(work, tokens, tensorboard={"enabled": True}), processes=2)
    return work / "run", output


def test_figures_are_in_the_journal_and_said_with_their_cost(run: tuple[Path, str]) -> None:
    run_dir, output = run
    for name, figure in (("mills", "accuracy"), ("prompts", "exact_match")):
        rows = rows_of(run_dir, name)
        assert [(row["step"], row["samples"]) for row in rows] == [(4, 5), (8, 5)]
        assert all(0 <= row[f"{figure}_low"] <= row[figure] <= row[f"{figure}_high"] <= 1 for row in rows)
    assert "task mills: 5 samples, 15 requests, " in output
    assert "3 truncated on the left: the arithmetic of" in output
    assert "tasks 2 evaluations: about" in output
    assert "step 8: mills: accuracy " in output
    assert list((run_dir / "tensorboard").rglob("events.*"))


def test_the_exported_model_has_the_figures_of_the_last_step(run: tuple[Path, str]) -> None:
    run_dir, _ = run
    model = run_dir.parent / "model"
    output_of(warm.run("-m", "pipeline", "export", run_dir, model))
    words = ("eval", "--model", f"own={model}", "--tasks", run_dir.parent / "c.json", "--json")
    found = json.loads(output_of(warm.run("-m", "pipeline", *words)))["own"]
    for name in ("mills", "prompts"):
        (*_, row) = rows_of(run_dir, name)
        assert found[name]["sequence_length"] == 48
        for figure, metric in found[name]["metrics"].items():
            assert metric["value"] == pytest.approx(row[figure], rel=1e-5), figure


def test_status_report_and_cards_have_the_figures_of_the_journal(run: tuple[Path, str], tmp_path: Path) -> None:
    run_dir, _ = run
    rows = {name: rows_of(run_dir, name)[-1] for name in ("mills", "prompts")}
    said = output_of(warm.run("-m", "pipeline", "status", run_dir))
    output_of(warm.run("-m", "pipeline", "report", tmp_path / "r.html", "--run", f"a={run_dir}"))
    page = (tmp_path / "r.html").read_text()
    output_of(warm.run("-m", "pipeline", "export", run_dir, tmp_path / "model"))
    output_of(warm.run("-m", "pipeline", "card", run_dir, tmp_path / "papers"))
    for name, row in rows.items():
        assert f"{name}: {figures_line(row)} at step 8" in said
        assert f"{figures_line(row)} at step 8" in page
    for folder in ("model", "papers"):
        card = (tmp_path / folder / "README.md").read_text()
        for figure in ("accuracy", "bits_per_byte"):
            cells = f"mills | 5 | {figure.replace('_', ' ')} | {with_interval(rows['mills'], figure)}"
            assert f"| {cells} |" in card
        results = front_matter_of(card)["model-index"][0]["results"]
        found = {each["dataset"]["name"]: each["metrics"] for each in results}
        (metric,) = found["prompts"]
        row = rows["prompts"]
        assert (metric["type"], metric["value"]) == ("exact_match", row["exact_match"])
        ends = {"low": row["exact_match_low"], "high": row["exact_match_high"]}
        assert metric["args"] == {"samples": 5, **ends}


def test_a_resumed_run_evaluates_what_is_missing_and_nothing_twice(run: tuple[Path, str]) -> None:
    run_dir, _ = run
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    (lost,) = [row for row in rows if row["kind"] == "task/prompts" and row["step"] == 8]
    kept = lines[: rows.index(lost)]
    path.write_text("".join(kept))  # killed after the first task of the last step
    launch("train.py", run_dir.parent / "c.json", processes=2)
    (*_, again) = rows_of(run_dir, "prompts")
    timeless = {"time": None, "seconds": None}
    assert {**again, **timeless} == {**lost, **timeless}
    assert [row["step"] for row in rows_of(run_dir, "mills")] == [4, 8]
    assert [row["step"] for row in read_rows(run_dir, kind="eval")] == [4, 8]
    assert len(losses(run_dir)) == 8


@pytest.mark.sweep
def test_a_run_killed_in_the_middle_of_an_evaluation_has_the_figures_of_one_that_was_not(
    tokens: Path, tmp_path: Path
) -> None:
    """SIGKILL while prompts are continued: the first task's row is there, the second's is not."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for work in (whole, killed):
        work.mkdir()
        config_of(work, tokens, engine="torch", prompts=400)
    launch("train.py", whole / "c.json")
    config, run_dir = killed / "c.json", killed / "run"
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(warm_command("train.py", config, processes=1), cwd=killed, **quiet)
    wait_until(
        lambda: (run_dir / "metrics.jsonl").exists() and rows_of(run_dir, "mills"), process=process, poll_s=0.005
    )
    os.kill(warm_python.real_pid(process.pid), signal.SIGKILL)
    process.wait()
    assert [row["step"] for row in rows_of(run_dir, "mills")] == [4]
    assert not rows_of(run_dir, "prompts"), "it was killed too late"
    launch("train.py", config)
    timeless = {"time": None, "seconds": None}
    for kind in ("eval", "task/mills", "task/prompts"):
        found, wanted = (
            [{**row, **timeless} for row in read_rows(work / "run", kind=kind)] for work in (killed, whole)
        )
        assert [row["step"] for row in found] == [4, 8]
        assert found == wanted
    assert losses(run_dir) == losses(whole / "run")


def test_the_report_has_a_chart_for_each_task(run: tuple[Path, str], tmp_path: Path) -> None:
    output_of(warm.run("-m", "pipeline", "report", tmp_path / "r.html", "--run", f"a={run[0]}"))
    page = (tmp_path / "r.html").read_text()
    assert "<h3>mills: accuracy</h3>" in page
    assert "<h3>prompts: exact match</h3>" in page


def test_a_bad_line_is_refused_before_training(tokens: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, tokens)
    file = tmp_path / "mills.jsonl"
    file.write_text(file.read_text() + '{"context": "a", "choices": [" b"], "answer": 1}\n')
    refused = refusal_of(start("train.py", config))
    assert f"{file}:6: answer is the number of the right choice" in refused
    assert not (tmp_path / "run").exists()


def test_prompts_are_refused_where_the_layout_cannot_continue_them(tokens: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, tokens, engine="torch")
    refused = refusal_of(start("train.py", config, "parallel.pp=2", processes=2))
    assert "parallel.pp = 2" in refused
    assert "a prompt is not continued there" in refused
    assert "remove the task prompts" in refused


def test_two_tasks_of_one_name_are_refused(tokens: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, tokens)
    refused = refusal_of(start("train.py", config, 'evaluation.tasks=[{"name": "sciq"}, {"file": "sciq.jsonl"}]'))
    assert "two tasks have the name sciq" in refused
    assert "a task has a name" in refusal_of(start("train.py", config, 'evaluation.tasks=[{"samples": 5}]'))


@pytest.fixture(scope="module")
def evaluation() -> TaskEvaluation:
    run = resolved({"engine": "torch", "train_micro_batch_size_per_gpu": 4}, processes=1)
    return TaskEvaluation(run, (), make_engine(run), 0, CPU)


def task_of(*lengths: int, generated: bool) -> EncodedTask:
    generator = torch.Generator().manual_seed(1)
    ids = tuple(torch.randint(VOCABULARY, (length,), generator=generator).numpy() for length in lengths)
    question: Any = GeneratedQuestion(" ", (" ",)) if generated else RankedQuestion((("", " "),), 0)
    return EncodedTask(TaskSection(name="t", new_tokens=8), (question,), ids, np.ones(len(ids), np.int64), 0, None)


def test_a_prompt_is_continued_as_if_it_were_alone(evaluation: TaskEvaluation) -> None:
    task = task_of(3, 20, 11, 1, 7, 20, generated=True)
    together = evaluation.continued(task)
    assert together is not None
    assert len({*together.flatten().tolist()}) > 4
    for number, ids in enumerate(task.ids):
        alone = EncodedTask(task.section, task.questions, (ids,), task.targets[:1], 0, None)
        assert evaluation.continued(alone).tolist() == [together[number].tolist()]


@pytest.mark.parametrize("generated", [True, False])
def test_an_evaluation_that_ends_early_has_no_figures(evaluation: TaskEvaluation, generated: bool) -> None:
    task = task_of(*range(5, 21), generated=generated)

    def first(batches: Iterator[Any]) -> Iterator[Any]:
        return islice(batches, 1)

    assert evaluation.figures(task, first) is None


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"parallel": {"pp": 2}}, r"(?s)parallel.pp = 2.*not continued there.*remove the task t"),
        ({"parallel": {"cp": 2}}, r"(?s)parallel.cp = 2.*not continued there"),
        ({"engine": "torch", "fp8": {"enabled": True, "emulate": True}, "bf16": {"enabled": True}}, "fp8.enabled"),
    ],
)
def test_prompts_are_refused_by_name_where_a_layout_cannot_continue_them(case: dict[str, Any], message: str) -> None:
    case = {"train_micro_batch_size_per_gpu": 2, **case}
    run = resolved(case, processes=2 if "parallel" in case else 1)
    with pytest.raises(ConfigError, match=message):
        check_tasks(run, torch.nn.Module(), (task_of(5, generated=True),))
    check_tasks(run, torch.nn.Module(), (task_of(5, generated=False),))


def test_prompts_are_refused_for_a_model_without_keys_and_values() -> None:
    config = MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=8)
    model = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    run = resolved({"engine": "torch"}, processes=1)
    with pytest.raises(ConfigError, match=r"(?s)evaluation.tasks = 't'.*a tiny mamba"):
        check_tasks(run, model, (task_of(5, generated=True),))
