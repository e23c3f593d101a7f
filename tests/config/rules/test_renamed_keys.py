"""An old config key is refused with its new name; directories that were written with old keys still work."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.base.directory import commit, read_manifest, write_manifest
from headrace.base.errors import ConfigError
from pipeline.config.load import load_config
from pipeline.config.rules.renamed_keys import RENAMED, upgrade_keys
from pipeline.config.sections.run import Config
from pipeline.evaluation.report.facts import facts
from pipeline.evaluation.report.runs import read_run
from tests import warm
from tests.conftest import launch, losses, start, tiny_config, write_config

VALUES: dict[str, Any] = {
    "memory.recompute": "full",
    "memory.every": 2,
    "parallel.shard": 2,
    "parallel.stages_per_rank": 2,
    "parallel.context": "ring",
    "watchdog.silent": 30.0,
    "watchdog.stuck": 900.0,
    "stragglers.slower_by": 0.2,
    "anomalies.give_up_after": 3,
    "data.schedule": [{"after_step": 0, "weights": {"all": 1.0}}],
}


def config(tmp_path: Path) -> dict[str, Any]:
    made = tiny_config(tmp_path / "tokens", tmp_path / "run", engine="torch")
    made["data"]["sources"][0]["name"] = "all"
    return made


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        section, name = key.split(".")
        made.setdefault(section, {})[name] = value
    return made


@pytest.mark.parametrize("old", RENAMED)
@pytest.mark.parametrize("how", ["in the file", "with --set"])
def test_an_old_key_is_refused_with_its_value_and_what_to_write(tmp_path: Path, old: str, how: str) -> None:
    section, name = old.split(".")
    made, sets = config(tmp_path), []
    if how == "in the file":
        made[section] = {**made.get(section, {}), name: VALUES[old]}
    else:
        sets = [f"{old}={json.dumps(VALUES[old])}"]
    with pytest.raises(ConfigError) as refused:
        load_config(write_config(tmp_path / "c.json", made), sets)
    assert (refused.value.field, refused.value.value) == (old, VALUES[old])
    assert f"why: renamed to {RENAMED[old]}" in str(refused.value)
    assert f'"{RENAMED[old].split(".")[1]}"' in refused.value.remedy


def test_what_the_refusal_says_to_write_loads(tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.json", config(tmp_path))
    with pytest.raises(ConfigError, match=r"--set parallel\.cp_method=ring"):
        load_config(path, ["parallel.context=ring"])
    assert load_config(path, ["parallel.cp_method=ring"]).parallel.cp_method == "ring"


def test_an_old_name_among_the_fields_that_may_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"renamed to data\.curriculum"):
        load_config(write_config(tmp_path / "c.json", config(tmp_path)), ['run.allow_change=["data.schedule"]'])


def test_every_new_key_exists_and_no_old_one_does(tmp_path: Path) -> None:
    fields = Config.model_validate(config(tmp_path)).model_dump()
    fields["data"].setdefault("curriculum", None)
    for old, new in RENAMED.items():
        section, name = new.split(".")
        assert name in fields[section], new
        assert old.split(".")[1] not in fields[section], old


def test_a_stored_config_is_upgraded_without_changing_the_original() -> None:
    stored = {**nested(VALUES), "engine": "torch"}
    before = copy.deepcopy(stored)
    upgraded = upgrade_keys(stored)
    assert stored == before
    assert upgraded == {**nested({RENAMED[old]: value for old, value in VALUES.items()}), "engine": "torch"}
    assert upgrade_keys(upgraded) == upgraded


def with_old_keys(stored: dict[str, Any]) -> dict[str, Any]:
    """A stored config as versions before the renaming wrote it."""
    made = copy.deepcopy(stored)
    for old, new in RENAMED.items():
        section, name = new.split(".")
        made[section][old.split(".")[1]] = made[section].pop(name)
    return made


def make_old(run_dir: Path) -> None:
    """Rewrites the manifests of a run and of its checkpoints with the old keys."""
    run = read_manifest(run_dir, kind="run")
    write_manifest(run_dir, kind="run", config=with_old_keys(run.config), parents=run.parents, details=run.details)
    for checkpoint in sorted((run_dir / "checkpoints").glob("step-*")):
        manifest = read_manifest(checkpoint, kind="checkpoint")
        staging = checkpoint.rename(checkpoint.with_name("staging"))
        summary = {"parents": manifest.parents, "details": manifest.details}
        commit(staging, checkpoint, kind="checkpoint", config=with_old_keys(manifest.config), **summary)


def test_a_run_that_was_stored_with_old_keys_is_read_exported_and_resumed(tokens: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    made = tiny_config(tokens, run_dir, engine="torch", zero_optimization={"stage": 0})
    made["data"] |= {"sources": [{"path": str(tokens), "name": "all"}], "curriculum": VALUES["data.schedule"]}
    made.pop("scheduler")
    path = write_config(tmp_path / "c.json", made)
    launch("train.py", path, "run.steps=4")
    make_old(run_dir)
    assert "curriculum" not in read_manifest(run_dir, kind="run").config["data"]
    checkpoint = next((run_dir / "checkpoints").glob("step-*"))
    # the stored names of what decides the curve have not changed
    assert read_manifest(checkpoint, kind="checkpoint").details["curve"]["data"]["schedule"] == [[0, [1.0]]]

    recorded = read_run("old", run_dir)
    assert recorded.manifest.config["data"]["curriculum"] == VALUES["data.schedule"]
    assert ("seed", "7") in facts(recorded, [])
    for command in (("samples", run_dir, "--step", 2), ("export", run_dir, tmp_path / "model")):
        done = warm.run("-m", "pipeline", *command)
        assert done.returncode == 0, done.stderr
    assert "curriculum" in read_manifest(tmp_path / "model", kind="model").config["data"]

    other = 'data.curriculum=[{"after_step": 0, "weights": {"all": 1}}, {"after_step": 4, "weights": {"all": 2}}]'
    refused = start("train.py", path, "run.steps=6", other)
    assert refused.returncode == 2
    assert 'run.allow_change: ["data.curriculum"]' in refused.stdout
    launch("train.py", path, "run.steps=5", other, 'run.allow_change=["data.curriculum"]')
    assert sorted(losses(run_dir)) == [1, 2, 3, 4, 5]
