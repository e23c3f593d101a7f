"""The place of a pod among others, from the variables of Kubeflow's Trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from pipeline.runtime.launch.pod import PodPlace, place_of_pod
from tests.conftest import tiny_config, write_config
from tests.support import refusal_of

POD = {
    "PET_NNODES": "4",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29400",
}


def test_the_ranks_of_a_pod_follow_those_of_the_pods_before() -> None:
    assert place_of_pod(POD) == PodPlace(16, 8, 32, "run-node-0-0.run", 29400)


@pytest.mark.parametrize("counted", ["auto", "gpu"])
def test_a_pod_without_a_number_has_a_rank_for_each_gpu_and_one_without_any(counted: str) -> None:
    environ = {**POD, "PET_NPROC_PER_NODE": counted}
    assert place_of_pod(environ, gpus=lambda: 4) == PodPlace(8, 4, 16, "run-node-0-0.run", 29400)
    assert place_of_pod(environ, gpus=lambda: 0) == PodPlace(2, 1, 4, "run-node-0-0.run", 29400)


def test_elsewhere_there_is_no_pod_nor_where_torchrun_has_started_the_process() -> None:
    assert place_of_pod({}) is None
    assert place_of_pod({**POD, "RANK": "3"}) is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"PET_NODE_RANK": "4"}, "PET_NODE_RANK"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES"),
        ({"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE"),
        ({"PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR"),
        ({"PET_MASTER_PORT": ""}, "PET_MASTER_PORT"),
    ],
)
def test_what_the_operator_would_not_set_is_refused_by_name(changed: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        place_of_pod({**POD, **changed})


def test_a_layout_that_leaves_a_pod_without_work_is_refused_before_a_rank_starts(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine="torch", parallel={"tp": 2, "elastic": True})
    command = [sys.executable, "-m", "headrace", "train", "--config", str(write_config(tmp_path / "c.json", config))]
    env = os.environ | POD | {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "1"}
    said = refusal_of(subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False))
    assert "the pods have 3 processes, and the layout takes 2" in said
    assert not (tmp_path / "run").exists()
