"""k8s/sky.yaml by SkyPilot's own schemas."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from foundation.errors import EXIT_LOST, EXIT_REQUEUE, EXIT_USAGE
from tests.conftest import ROOT, losses, tiny_config, write_config
from tests.k8s.manifests import K8S, misspelt

TASK = yaml.safe_load((K8S / "sky.yaml").read_text())
# SkyPilot needs an older click than headrace, so that it has an environment of its own
PYTHON = Path(os.environ.get("HEADRACE_SKY_PYTHON", ROOT / ".venv-sky/bin/python"))
NEEDS_SKY = pytest.mark.skipif(not PYTHON.exists(), reason=f"needs SkyPilot in {PYTHON} (.ci/run installs it)")
(MOUNTED_CONFIG,) = TASK["file_mounts"]
USERS_KEYS = ("volumes.", "file_mounts.")


def refusals(tasks: list[Any]) -> list[str | None]:
    command = [str(PYTHON), str(ROOT / "tests/k8s/check_sky.py")]
    # it would tell its authors that it was used
    env = os.environ | {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, input=json.dumps(tasks), capture_output=True, text=True, check=True, timeout=120, env=env
    )
    found: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.integration
@pytest.mark.sweep
def test_the_commands_of_the_task_train_on_the_nodes_that_its_variables_name(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", run={"dir": str(tmp_path / "run"), "steps": 6, "seed": 7})
    config["scheduler"]["params"] = {"warmup_num_steps": 2, "decay_num_steps": 2}
    commands = TASK["run"].replace(MOUNTED_CONFIG, str(write_config(tmp_path / "train.json", config)))
    with socket.socket() as probe:  # two nodes of this machine: its usual port may be taken
        probe.bind(("127.0.0.1", 0))
        commands = commands.replace("29400", str(probe.getsockname()[1]))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1\n",
    }
    nodes = [
        subprocess.Popen(
            ["bash", "-c", commands],
            env={**os.environ, **given, "PATH": path, "SKYPILOT_NODE_RANK": rank},
            cwd=tmp_path,
        )
        for rank in ("0", "1")
    ]
    assert [node.wait(timeout=240) for node in nodes] == [0, 0]
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


@NEEDS_SKY
def test_the_task_is_valid_and_every_misspelt_key_is_refused() -> None:
    changed = {path: task for path, task in misspelt(TASK) if not path.startswith(USERS_KEYS)}
    valid, *answers = refusals([TASK, *changed.values()])
    assert valid is None
    assert [path for path, answer in zip(changed, answers, strict=True) if answer is None] == []
    assert len(changed) >= 10


def test_the_codes_that_start_the_job_again_are_those_of_a_lost_or_stopped_run() -> None:
    codes = TASK["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert {EXIT_LOST, EXIT_REQUEUE, 137} == set(codes)
    assert EXIT_USAGE not in codes


def test_the_files_that_the_task_mounts_are_here() -> None:
    assert all((ROOT / path).is_file() for path in TASK["file_mounts"].values())
