"""A run that begins with another run's step: the same curve, its own directory, and a record of where it comes from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from foundation.directory import read_manifest, write_manifest
from foundation.errors import CheckpointError, ConfigError
from foundation.section import parse
from headrace.commands.app import run as headrace
from pipeline.checkpoint.pins import pinned_steps
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config
from pipeline.data.skips import Skips
from pipeline.models.card.lineage import training_lineage
from pipeline.run.anomalies.suspect_samples import RunSamples
from pipeline.run.before.summary import prepared_entries
from pipeline.run.command_branch import branched
from pipeline.run.manifest import RunManifest
from pipeline.run.prepare import prepare
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import launch, losses, text_folders, tiny_config, write_config
from tests.engines.comparison import FP32

STEPS, AT = 9, 6


def config_of(tokens: Path, run_dir: Path, **run: Any) -> dict[str, Any]:
    config = tiny_config(tokens, run_dir, engine="torch", zero_optimization={"stage": 0})
    config["run"] |= {"steps": STEPS, "checkpoint_every": 3, "keep_checkpoints": 9, **run}
    config["evaluation"] = {"samples": 0}
    return config


@pytest.fixture(scope="module")
def base(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("base")
    launch("train.py", write_config(work / "c.json", config_of(tokens, work / "base")))
    return work / "base"


@pytest.fixture(scope="module")
def branch(base: Path) -> Path:
    """A branch with the same config, made and started as a user would."""
    run_dir = base.parent / "branch"
    words = ["branch", str(base), "--at", str(AT), "--set", f"run.dir={run_dir}"]
    assert headrace(words) == 0
    said = launch("train.py", run_dir.with_suffix(".json"))
    assert f"resuming after step {AT} from {base}" in said
    return run_dir


def checkpoint(run: Path, step: int) -> Path:
    return run / f"checkpoints/step-{step:08d}"


def test_a_branch_follows_its_base_to_the_bit_and_on_the_other_engine(base: Path, branch: Path, tmp_path: Path) -> None:
    expected = {step: loss for step, loss in losses(base).items() if step > AT}
    assert losses(branch) == expected
    ours, theirs = (next(checkpoint(run, STEPS).glob("*.distcp")).read_bytes() for run in (branch, base))
    assert ours == theirs
    other = tmp_path / "other"
    launch("train.py", branch.with_suffix(".json"), f"run.dir={other}", "engine=deepspeed", "zero_optimization.stage=2")
    assert losses(other) == pytest.approx(expected, rel=FP32)


def test_a_branch_pins_its_start_and_needs_it_only_until_its_first_checkpoint(
    base: Path, branch: Path, tmp_path: Path
) -> None:
    assert pinned_steps(base) == {AT}
    moved = Path(shutil.copytree(base, tmp_path / "base", symlinks=True))
    own = Path(shutil.copytree(branch, tmp_path / "own", symlinks=True))
    config = Path(shutil.copy(branch.with_suffix(".json"), own.with_suffix(".json")))
    begun = (f"run.dir={own}", f"run.from={moved}@{AT}")
    shutil.rmtree(own / "checkpoints")
    manifest = read_manifest(own, kind="run")
    details = {**manifest.details, "step": AT, "finished": False}  # as of a branch that was killed in its second step
    write_manifest(own, kind="run", config=manifest.config, parents=manifest.parents, details=details)
    launch("train.py", config, *begun)
    assert losses(own) == losses(branch)
    shutil.rmtree(moved)
    shutil.rmtree(checkpoint(own, STEPS))
    shutil.copytree(checkpoint(base, AT), checkpoint(own, AT))  # the newest of a branch with a checkpoint of its own
    own_manifest(checkpoint(own, AT), read_manifest(checkpoint(branch, STEPS), kind="checkpoint").details["branch"])
    assert f"resuming after step {AT} from {own}" in launch("train.py", config, *begun)
    assert losses(own) == losses(branch)


def own_manifest(path: Path, came_from: dict[str, Any]) -> None:
    manifest = read_manifest(path, kind="checkpoint")
    details = {**manifest.details, "branch": came_from}
    about = {"config": manifest.config, "parents": manifest.parents, "details": details, "files": manifest.files}
    write_manifest(path, kind="checkpoint", **about)


def test_lineage_counts_each_token_once_and_earlier_steps_are_looked_up_in_the_base(
    base: Path, branch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lineages = [training_lineage(read_manifest(checkpoint(run, STEPS), kind="checkpoint")) for run in (base, branch)]
    whole, parts = ([step["tokens"] for step in lineage["steps"]] for lineage in lineages)
    assert parts == [AT * 256, (STEPS - AT) * 256]
    assert sum(parts) == sum(whole)
    assert lineages[1]["corpora"] == lineages[0]["corpora"]
    assert headrace(["samples", str(branch), "--step", str(AT + 1), "--limit", "1"]) == 0
    assert headrace(["samples", str(branch), "--step", str(AT)]) == 2
    assert f"steps up to {AT} are those of {base}" in capsys.readouterr().err
    page = branch.parent / "report.html"
    assert headrace(["report", str(page), "--run", f"base={base}", "--run", f"branch={branch}"]) == 0
    assert f"{base}, from step {AT}" in page.read_text()
    assert f"<ul><li>base<ul><li>branch, from step {AT}</li></ul></li></ul>" in page.read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run": {"from": "base@5"}}, "no checkpoint of step 5\n  try: the nearest it has, of step 3 and 6"),
        ({"run": {"from": "base@9", "steps": 9}}, "the run ends with step 9"),
        ({"run": {"from": "base"}}, "it names no step"),
        ({"model": {"config": {"hidden_size": 96}}}, "has shape (512, 96) in the config's model, and (512, 48) in the"),
        ({"train_batch_size": 16}, "have 8 samples of 32 tokens to step 6\n    the config has 16 samples of"),
        ({"data": {"sequence_length": 16}}, "config has 8 samples of 16 tokens to step 6\n  try: put them back"),
    ],
)
def test_a_branch_that_cannot_be_is_refused_by_check(
    changes: dict[str, Any], said: str, base: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    start = {"run": {"dir": str(tmp_path / "run"), "from": f"base@{AT}"}}
    tree = branched(config_of(tokens, base), {}, start=f"base@{AT}", run_dir=str(tmp_path / "run"))
    for section, fields in {**start, **changes}.items():
        tree[section] = fields if not isinstance(fields, dict) else merged(tree[section], fields)
    with pytest.raises((ConfigError, CheckpointError)) as error:
        prepare(resolve(parse(Config, tree), world_size=1))
    assert said in str(error.value)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return {**old, **{k: merged(old[k], v) if isinstance(v, dict) else v for k, v in new.items()}}


def test_other_data_and_schedule_may_begin_and_another_tokenizer_or_start_may_not(
    base: Path, branch: Path, tmp_path: Path
) -> None:
    tree = json.loads(branch.with_suffix(".json").read_text())
    fresh = merged(tree, {"run": {"dir": str(tmp_path / "run"), "seed": 8}}) | {"scheduler": None}
    prepared = prepare(resolve(parse(Config, fresh), world_size=1))
    assert prepared.origin is not None
    assert f"resume after step {AT} of {base}" in [entry.text for entry in prepared_entries(prepared)]
    begun = merged(tree, {"run": {"from": f"{base}@3"}})
    with pytest.raises(ConfigError, match=f"is of a run that began with step {AT} of {base}"):
        prepare(resolve(parse(Config, begun), world_size=1))
    spoken = Path(shutil.copytree(base, tmp_path / "spoken", symlinks=True))
    manifest = read_manifest(checkpoint(spoken, AT), kind="checkpoint")
    manifest.details["tokenizer"]["fingerprint"] = "another"
    about = {"config": manifest.config, "parents": manifest.parents, "details": manifest.details}
    write_manifest(checkpoint(spoken, AT), kind="checkpoint", files=manifest.files, **about)
    other = merged(fresh, {"run": {"from": f"{spoken}@{AT}"}})
    with pytest.raises(CheckpointError, match=r"its tokenizer is not that of data\.sources"):
        prepare(resolve(parse(Config, other), world_size=1))


def test_epochs_of_a_branch_are_those_that_it_has_read_itself(branch: Path, tmp_path: Path) -> None:
    tree = merged(json.loads(branch.with_suffix(".json").read_text()), {"run": {"dir": str(tmp_path / "run")}})
    second = {"name": "second", "until": "rest", "continue_sources": False, "data": {"sequence_length": 32}}
    tree["stages"] = [{"name": "first", "until": {"steps": AT + 1}}, second]
    prepared = prepare(resolve(parse(Config, tree), world_size=1))
    assert prepared.origin is not None
    written = RunManifest(prepared, rank=0, branch=prepared.origin.details())
    ledger = written.checkpoint(STEPS, skips=Skips(), anomalies={}).details["ledger"]
    windows = prepared.mixture.sources[0].windows
    assert [row["last_step"] for row in ledger] == [AT, AT + 1, STEPS]
    assert [row["epochs"] for row in ledger[1:]] == [[round(8 / windows, 6)], [round(16 / windows, 6)]]


def test_a_chain_of_branches_equals_the_same_run_in_stages_to_the_bit(tokens: Path, tmp_path: Path) -> None:
    named = [{"path": str(tokens), "source": str(name), "weight": each} for each, name in enumerate(text_folders(), 1)]
    decay = {"type": "WSD", "params": {"warmup_num_steps": 0, "decay_num_steps": 3, "min_ratio": 0.1}}
    long = {"data": {"sequence_length": 64, "mask_documents": True}, "optimizer_states": "fresh", "scheduler": decay}
    again = {"data": {"sources": [{"path": str(tokens)}], "sequence_length": 32}, "optimizer": {"params": {"lr": 1e-3}}}
    stages: list[dict[str, Any]] = [
        {"name": "stable", "until": {"steps": 2}},
        {"name": "mixed", "until": {"steps": 4}, "data": {"sources": named}, "train_batch_size": 4},
        {"name": "long", "until": {"steps": 7}, **long},
        {"name": "again", "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}, **again},
    ]
    plain = {**config_of(tokens, tmp_path / "stable", steps=2), "scheduler": None}
    whole = merged(plain, {"run": {"dir": str(tmp_path / "whole"), "steps": STEPS}}) | {"stages": stages}
    launch("train.py", write_config(tmp_path / "whole.json", whole))
    launch("train.py", write_config(tmp_path / "stable.json", plain))
    runs, begun = [tmp_path / "stable"], 2
    for number, last in ((1, 4), (2, 7), (3, STEPS)):
        run = {"dir": str(tmp_path / stages[number]["name"]), "steps": last}
        own = {"run": run, "stages": [*stages[:number], {**stages[number], "until": "rest"}]}
        changes = write_config(tmp_path / f"changes-{last}.json", own)
        assert headrace(["branch", str(runs[-1]), "--at", str(begun), "--config", str(changes)]) == 0
        runs, begun = [*runs, Path(run["dir"])], last
        launch("train.py", runs[-1].with_suffix(".json"))
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "samples")
    rows = [
        [[row.get(key) for key in keys] for row in read_rows(run, kind="step")] for run in (tmp_path / "whole", *runs)
    ]
    assert rows[0] == [row for run in rows[1:] for row in run]
    ends = [checkpoint(run, STEPS) for run in (tmp_path / "whole", runs[-1])]
    ours, theirs = (next(end.glob("*.distcp")).read_bytes() for end in ends)
    assert ours == theirs
    ledgers = [read_manifest(end, kind="checkpoint").details["ledger"] for end in ends]
    counts = [
        [(row["last_step"], row["tokens"], row.get("targets", row["tokens"])) for row in each] for each in ledgers
    ]
    assert counts[0] == counts[1]
    text = [RunSamples.open(run) for run in (tmp_path / "whole", runs[-1])]
    headers = [[each.header(sample) for sample in each.samples_of_steps(8, STEPS)] for each in text]
    assert headers[0] == headers[1]


def test_the_config_of_a_branch_has_the_changes_and_not_what_they_replace() -> None:
    base = {
        "run": {"dir": "runs/base", "tokens": 1000, "allow_change": ["run.tokens"]},
        "scheduler": {"type": "WSD", "params": {"decay_num_steps": 5}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0, "betas": [0.9, 0.95]}},
    }
    changes = {"run": {"steps": 7}, "scheduler": {"type": "WarmupLR"}, "optimizer": {"params": {"lr": 2.0}}}
    assert branched(base, changes, start="runs/base@5", run_dir="runs/b") == {
        "run": {"dir": "runs/b", "from": "runs/base@5", "steps": 7},
        "scheduler": {"type": "WarmupLR"},
        "optimizer": {"type": "AdamW", "params": {"lr": 2.0, "betas": [0.9, 0.95]}},
    }


@pytest.mark.parametrize("group", ["islands", "replicas"])
def test_groups_of_processes_do_not_begin_with_another_runs_state(group: str, tokens: Path, tmp_path: Path) -> None:
    config = {**config_of(tokens, tmp_path / "run", **{"from": "runs/base@3"}), group: {"count": 2}}
    with pytest.raises(ConfigError, match=rf"run\.from\n  why: it does not combine with {group}"):
        resolve(parse(Config, config), world_size=1)
