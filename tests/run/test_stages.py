"""A run in stages: what its steps were, and resumes around a border, which give the curve of a run never stopped."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foundation.directory import read_manifest, staging_path
from pipeline.checkpoint.export.find import RunPlace
from pipeline.checkpoint.merging.coefficients import MergeMethod
from pipeline.checkpoint.merging.merge import Merge
from pipeline.checkpoint.merging.sources import choose, open_sources
from pipeline.cluster.status.run import read_status
from pipeline.config.rules.curve import recorded_schedule
from pipeline.evaluation.report.facts import facts
from pipeline.evaluation.report.runs import read_run
from pipeline.models.card.lineage import training_lineage
from pipeline.run.anomalies.suspect_samples import RunSamples
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import launch, losses, start, tiny_config, warm_command, write_config
from tests.engines.comparison import FP32
from tests.run.test_changed_resume import lose_checkpoints_after
from tests.support import kill_group, refusal_of, wait_until

pytestmark = pytest.mark.integration
BORDER, STEPS = 6, 12
TOKENS = 2 * 4 * 32 + 4 * 8 * 32 + 6 * 4 * 64  # the ramp, the rest of the stage, the second stage


def staged_config(tokens: Path, run_dir: Path, **fields: Any) -> dict[str, Any]:
    """Two stages: a batch ramp from 4 to 8, then longer sequences with another RoPE, masks, batch and schedule."""
    wsd = {"type": "WSD", "params": {"warmup_num_steps": 0, "decay_num_steps": 6}}
    long = {"data": {"sequence_length": 64, "mask_documents": True}, "train_batch_size": 4, "scheduler": wsd}
    model = {"config": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500000.0}}}
    return tiny_config(
        tokens,
        run_dir,
        zero_optimization={"stage": 2},
        scheduler=None,
        train_batch_size={"from": 4, "to": 8, "over_tokens": 256},
        run={"dir": str(run_dir), "steps": STEPS, "seed": 7, "checkpoint_every": 1, "keep_checkpoints": 99},
        evaluation={"samples": 16, "every": 6},
        stages=[{"name": "stable", "until": {"steps": BORDER}}, {"name": "long", "model": model, **long}],
        **{"engine": "torch", **fields},
    )


@pytest.fixture(scope="module")
def whole(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in stages on one process of engine torch that nobody stopped."""
    work = tmp_path_factory.mktemp("whole")
    said = launch("train.py", write_config(work / "c.json", staged_config(tokens, work / "run")))
    assert f"{STEPS} steps = {TOKENS:,} tokens" in said
    assert f"stage 'long': steps {BORDER + 1} to {STEPS}; it changes data, model, scheduler, train_batch_size" in said
    return work / "run"


def rows_of(run: Path) -> dict[int, tuple[Any, ...]]:
    """Step -> all that a step of a resumed run has to have in common with that of a run never stopped."""
    keys = ("loss", "grad_norm", "lr", "samples", "tokens", "stage")
    return {row["step"]: tuple(row.get(key) for key in keys) for row in read_rows(run, kind="step")}


def test_rows_and_readers_count_every_step_as_it_was(whole: Path) -> None:
    rows = rows_of(whole)
    assert [row[4] for row in rows.values()] == [128, 256, *range(512, 1281, 256), *range(1536, TOKENS + 1, 256)]
    assert [row[5] for row in rows.values()] == ["stable"] * BORDER + ["long"] * (STEPS - BORDER)
    assert rows[BORDER][2] == 3e-3  # the constant rate of the first stage; the second has a decay of its own
    assert rows[STEPS][2] == 0.0
    checkpoint = read_manifest(whole / f"checkpoints/step-{BORDER + 2:08}", kind="checkpoint")
    assert checkpoint.details["samples"] == rows[BORDER + 2][3]
    ledger = checkpoint.details["ledger"]
    assert [row["tokens"] for row in ledger] == [256, 1024, 512]
    assert [row["targets"] for row in ledger[:2]] == [256, 1024]
    last = read_manifest(whole / f"checkpoints/step-{STEPS:08}", kind="checkpoint").details["ledger"][-1]
    documents = 24 * 64 - last["targets"]  # no target crosses a border of documents, of which these samples have few
    assert 0 <= documents < 24
    assert last["tokens"] == 24 * 64
    windows = RunSamples.open(whole).mixtures[0].sources[0].windows
    assert ledger[1]["epochs"] == [round(40 / windows, 6)]
    lineage = training_lineage(read_manifest(whole / "checkpoints" / f"step-{STEPS:08}", kind="checkpoint"))
    assert lineage["steps"][-1]["tokens"] == TOKENS  # what cards and the EU's summary name
    assert lineage["steps"][-1]["sequence_length"] == 64
    report = dict(facts(read_run("run", whole), []))
    assert report["tokens"] == f"{TOKENS:,}, 128 to 256 per step"
    assert report["stage long"] == "steps 7 to 12, 4 samples of 64 tokens, 1,536 tokens"
    assert read_run("run", whole).evaluated()[0].tolist() == [1280, TOKENS]
    assert read_status(whole).steps == STEPS


def test_the_rate_of_every_step_is_in_the_record_and_a_merge_warns_of_a_stage_that_decays(whole: Path) -> None:
    places = choose([RunPlace.parse(str(whole))], last=STEPS, steps=())
    # apart, since checkpoints with different RoPE are not merged
    stages = [[each for each in places if (each[1].step > BORDER) == later] for later in (False, True)]
    sources = {each.checkpoint.step: each for stage in stages for each in open_sources(stage)}
    curve = sources[STEPS].manifest.details["curve"]
    assert {step: recorded_schedule(curve, step).lr(step) for step in sources} == {
        row["step"]: row["lr"] for row in read_rows(whole, kind="step")
    }

    def rates(*steps: int) -> tuple[float, float] | None:
        return Merge.of([sources[step] for step in steps], MergeMethod("wsm")).rates()

    peak = recorded_schedule(curve, 1).lr(1)
    assert rates(2, 4, BORDER) is None
    assert rates(4, BORDER, STEPS) == (peak, 0)  # the border lies between these checkpoints
    assert rates(BORDER, BORDER + 2, BORDER + 4) == pytest.approx((peak * 5 / 6, peak * 2 / 6))


def test_samples_prints_what_each_step_of_each_stage_read(whole: Path) -> None:
    reader = RunSamples.open(whole)
    assert [len(list(reader.samples_of_steps(step, step))) for step in (1, 3, 7)] == [4, 8, 4]
    [first], [last] = (list(reader.samples_of_steps(step, step))[:1] for step in (1, STEPS))
    assert (first.stage, last.stage) == (0, 1)
    assert "stage long" in reader.header(last)
    lengths = [sum(part.size for part in _targets(reader, sample)) for sample in (first, last)]
    assert lengths == [33, 65]
    [by_number] = reader.samples(last.number, last.number)
    assert reader.header(by_number) == reader.header(last).replace(f", step {STEPS}", "")


def _targets(reader: RunSamples, sample: Any) -> list[Any]:
    from pipeline.data.trained_sample import trained_documents  # noqa: PLC0415

    mixture = reader.mixtures[sample.stage]
    return [part.tokens for part in trained_documents(mixture, sample.number, mask_documents=False)]


@pytest.mark.parametrize("step", [BORDER - 1, BORDER, pytest.param(BORDER + 1, marks=pytest.mark.sweep)])
def test_a_resume_around_a_border_gives_the_same_bits(whole: Path, tokens: Path, tmp_path: Path, step: int) -> None:
    shutil.copytree(whole, tmp_path / "run")
    lose_checkpoints_after(tmp_path / "run", step)
    config = write_config(tmp_path / "c.json", staged_config(tokens, tmp_path / "run"))
    assert f"resuming after step {step} from" in launch("train.py", config)
    assert rows_of(tmp_path / "run") == rows_of(whole)
    evaluations = [
        [(row["step"], row["loss"]) for row in read_rows(run, kind="eval")] for run in (whole, tmp_path / "run")
    ]
    assert evaluations[0] == evaluations[1]


def test_an_evaluation_cut_short_at_a_border_is_made_by_the_stage_that_ends_there(
    whole: Path, tokens: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    lose_checkpoints_after(run, BORDER)
    journal = run / "metrics.jsonl"
    before = next(row for row in read_rows(run, kind="eval") if row["step"] == BORDER)
    lines = [line for line in journal.read_text().splitlines(keepends=True) if '"kind": "eval"' not in line]
    journal.write_text("".join(lines))
    launch("train.py", write_config(tmp_path / "c.json", staged_config(tokens, run)))
    again = next(row for row in read_rows(run, kind="eval") if row["step"] == BORDER)
    assert {**again, "time": 0, "seconds": 0} == {**before, "time": 0, "seconds": 0}


@pytest.mark.parametrize(
    ("engine", "stage"), [("deepspeed", 1), pytest.param("deepspeed", 3, marks=pytest.mark.sweep), ("torch", 3)]
)
def test_a_run_of_one_process_crosses_the_border_on_two_ranks_of_either_engine(
    whole: Path, tokens: Path, tmp_path: Path, engine: str, stage: int
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    lose_checkpoints_after(tmp_path / "run", BORDER - 1)
    config = write_config(tmp_path / "c.json", staged_config(tokens, tmp_path / "run"))
    sets = (f"engine={engine}", f"zero_optimization.stage={stage}", "train_micro_batch_size_per_gpu=1")
    launch("train.py", config, *sets, processes=2)
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=FP32)


LAYOUTS: list[Any] = [
    ("torch", {"parallel": {"tp": 2}, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}),
    ("deepspeed", {"parallel": {"pp": 2}, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}),
    ("deepspeed", {"parallel": {"tp": 2}, "train_micro_batch_size_per_gpu": 4}),
    ("deepspeed", {"parallel": {"cp": 2}, "zero_optimization": {"stage": 3}}),
    ("torch", {"parallel": {"pp": 2}, "memory": {"activation_checkpointing": "full"}}),
    ("torch", {"parallel": {"cp": 2, "cp_method": "ring"}}),
]


@pytest.mark.parametrize(
    ("engine", "changes"), [*LAYOUTS[:2], *(pytest.param(*each, marks=pytest.mark.sweep) for each in LAYOUTS[2:])]
)
def test_a_stage_in_another_layout_forms_its_groups_anew_and_follows_one_process(
    whole: Path, tokens: Path, tmp_path: Path, engine: str, changes: dict[str, Any]
) -> None:
    config = staged_config(tokens, tmp_path / "run", engine=engine, train_micro_batch_size_per_gpu=1)
    config["stages"][1] |= changes
    shutil.copytree(whole, tmp_path / "run")
    lose_checkpoints_after(tmp_path / "run", BORDER - 2)
    launch("train.py", write_config(tmp_path / "c.json", config), processes=2)
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=FP32)


def test_optimizer_states_start_at_zero_at_a_border_that_says_so(whole: Path, tokens: Path, tmp_path: Path) -> None:
    config = staged_config(tokens, tmp_path / "run")
    config["stages"][1]["optimizer_states"] = "fresh"
    path, found = write_config(tmp_path / "c.json", config), []
    for step in (BORDER - 1, BORDER):  # across the border, and a resume at it
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "run")
        lose_checkpoints_after(tmp_path / "run", step)
        said = launch("train.py", path, 'run.allow_change=["stages"]')
        assert said.count("the optimizer's state starts at zero, as stage 'long' says") == 1
        found.append(losses(tmp_path / "run"))
    kept = losses(whole)
    assert found[0] == found[1]
    assert found[0][BORDER + 1] == kept[BORDER + 1]  # by the same weights; the next by another update
    assert found[0][BORDER + 2] != kept[BORDER + 2]


def killed(command: list[str], run: Path, moment: Callable[[], bool]) -> None:
    """Starts a run and kills all its processes at a moment."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=run.parent, start_new_session=True, **quiet)
    wait_until(moment, process=process, poll_s=0.001)
    kill_group(process)


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_a_run_killed_while_the_border_is_saved_goes_on_with_the_same_bits(
    whole: Path, tokens: Path, tmp_path: Path, engine: str
) -> None:
    config = write_config(tmp_path / "c.json", staged_config(tokens, tmp_path / "run"))
    sets = () if engine == "torch" else ("engine=deepspeed",)
    expected = whole
    if engine == "deepspeed":
        expected = tmp_path / "expected"
        launch("train.py", config, *sets, f"run.dir={expected}", "run.checkpoint_every=6")
    place = tmp_path / f"run/checkpoints/step-{BORDER:08}"
    command = warm_command("train.py", config, *sets, processes=1)
    killed(command, tmp_path / "run", lambda: staging_path(place).exists() or place.exists())
    said = launch("train.py", config, *sets)
    assert "resuming after step" in said
    assert rows_of(tmp_path / "run") == rows_of(expected)


@pytest.mark.sweep
@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_twenty_kills_around_borders_leave_the_curve_as_it_was(tokens: Path, tmp_path: Path, engine: str) -> None:
    draw = random.Random(20)
    config = write_config(tmp_path / "c.json", staged_config(tokens, tmp_path / "run", engine=engine))
    launch("train.py", config, f"run.dir={tmp_path / 'whole'}")
    for _ in range(10):
        step = draw.choice([BORDER - 1, BORDER, BORDER + 1])
        lose_checkpoints_after(tmp_path / "run", draw.randrange(1, step))
        place, late = tmp_path / f"run/checkpoints/step-{step:08}", draw.random() < 0.5
        command = warm_command("train.py", config, processes=1)
        killed(
            command,
            tmp_path / "run",
            place.exists if late else lambda at=place: staging_path(at).exists() or at.exists(),
        )
    launch("train.py", config)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


def test_data_and_batch_that_change_on_resume_make_stages_and_old_numbers_stay_true(
    tokens: Path, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"engine": "torch", "scheduler": None, "evaluation": {"samples": 0}}
    run = {"dir": str(tmp_path / "run"), "steps": 12, "seed": 7, "checkpoint_every": 3, "keep_checkpoints": 9}
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", **fields, run=run))
    launch("train.py", config, "run.steps=6")
    before = RunSamples.open(tmp_path / "run")
    text = [line for sample in before.samples_of_steps(1, 1) for line in before.text(sample)]
    longer, names = "data.sequence_length=64", 'run.allow_change=["data.sequence_length", "train_batch_size"]'
    assert 'run.allow_change: ["data.sequence_length"]' in refusal_of(start("train.py", config, longer))
    said = launch("train.py", config, longer, names, "run.steps=9")
    assert f"9 steps = {6 * 256 + 3 * 512:,} tokens" in said
    lose_checkpoints_after(tmp_path / "run", 6)  # a resume finds the stages in the manifest, not in the config
    launch("train.py", config, longer, names, "run.steps=9")
    said = refusal_of(start("train.py", config))  # back to 32 tokens, and not allowed
    assert "data.sequence_length = 32" in said
    assert 'run.allow_change: ["data.sequence_length"]' in said
    launch("train.py", config, longer, names, "train_batch_size=4")
    rows = rows_of(tmp_path / "run")
    assert [row[4] for row in rows.values()] == [*range(256, 1537, 256), 2048, 2560, 3072, 3328, 3584, 3840]
    after = RunSamples.open(tmp_path / "run")
    assert [line for sample in after.samples_of_steps(1, 1) for line in after.text(sample)] == text
    lineage = training_lineage(read_manifest(tmp_path / "run/checkpoints/step-00000012", kind="checkpoint"))
    assert lineage["steps"][-1]["tokens"] == 3840
    # the same run, whose stages were written from the beginning
    stages = [
        {"name": "until-step-6", "until": {"steps": 6}},
        {"name": "from-step-7", "until": {"steps": 9}, "data": {"sequence_length": 64}},
        {"name": "from-step-10", "train_batch_size": 4},
    ]
    whole = tiny_config(
        tokens, tmp_path / "whole", **fields, run={**run, "dir": str(tmp_path / "whole")}, stages=stages
    )
    launch("train.py", write_config(tmp_path / "whole.json", whole))
    staged = rows_of(tmp_path / "whole")
    assert [row[:5] for row in rows.values()] == [row[:5] for row in staged.values()]


def test_a_stage_to_come_may_change_and_one_that_has_begun_may_not(whole: Path, tokens: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    lose_checkpoints_after(tmp_path / "run", BORDER)
    config = staged_config(tokens, tmp_path / "run")
    config["stages"][1]["train_batch_size"] = 2
    path = write_config(tmp_path / "c.json", config)
    said = refusal_of(start("train.py", path))
    assert "was 4, now 2" in said
    assert "run.allow_change: [" in said
    launch("train.py", path, 'run.allow_change=["stages"]')
    assert rows_of(tmp_path / "run")[STEPS][4] == 1280 + 6 * 128
    again = write_config(tmp_path / "c.json", {**config, "stages": staged_config(tokens, tmp_path / "run")["stages"]})
    said = refusal_of(start("train.py", again, 'run.allow_change=["stages"]'))
    assert "run.allow_change cannot allow that" in said


def test_a_branch_of_a_staged_run_counts_by_the_record_of_both_parts(whole: Path, tokens: Path, tmp_path: Path) -> None:
    at, longer = BORDER + 2, BORDER + 4  # within the second stage of the run, which ends earlier in the branch
    config = staged_config(tokens, tmp_path / "run")
    stable, long = config["stages"]
    short = {"name": "short", "data": {"sequence_length": 32}}
    config["stages"] = [stable, {**long, "until": {"steps": longer}}, short]
    config["run"] |= {"from": f"{whole}@{at}", "ema": {"decay": 0.9}}
    launch("train.py", write_config(tmp_path / "c.json", config))
    rows, before = rows_of(tmp_path / "run"), rows_of(whole)
    assert list(rows) == list(range(at + 1, STEPS + 1))
    assert [row[4] for row in rows.values()] == [before[at][4] + each for each in (256, 512, 640, 768)]
    assert rows[at + 1][:2] == before[at + 1][:2]  # the same weights, states and samples
    last = read_manifest(tmp_path / f"run/checkpoints/step-{STEPS:08}", kind="checkpoint")
    base = read_manifest(whole / f"checkpoints/step-{at:08}", kind="checkpoint").details["ledger"]
    ledger = last.details["ledger"]
    assert ledger[: len(base)] == base
    assert [(row["first_step"], row["tokens"]) for row in ledger[len(base) :]] == [(at + 1, 512), (longer + 1, 256)]
    assert all(0 < row["targets"] <= row["tokens"] for row in ledger)
    parts = [step["tokens"] for step in training_lineage(last)["steps"]]
    assert parts == [before[at][4], 768]
    [evaluated] = read_rows(tmp_path / "run", kind="eval")[-1:]
    assert evaluated["step"] == STEPS
    assert evaluated["ema_loss"] != evaluated["loss"]
