"""Who started us: torchrun and deepspeed, srun, or nobody."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from pipeline.launch import Launch, detect

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}


def test_torchrun_and_deepspeed_are_read_from_their_variables() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **MASTER}
    assert detect(environ) == Launch("environment", 3, 4, 1, "10.0.0.1:1234")
    assert detect({**environ, "TORCHELASTIC_RUN_ID": "x"}) == Launch("torchrun", 3, 4, 1, "10.0.0.1:1234")
    assert detect({**environ, "CROSS_RANK": "0"}) == Launch("deepspeed", 3, 4, 1, "10.0.0.1:1234")


def test_srun_is_read_from_slurms_variables() -> None:
    environ = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", **MASTER}
    assert detect(environ) == Launch("slurm", 5, 8, 1, "10.0.0.1:1234")


def test_the_batch_script_of_a_job_is_one_process() -> None:
    # there SLURM_PROCID and SLURM_NTASKS are set too, but nobody else was started
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).world_size == 1


def test_srun_without_a_meeting_place_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"slurm/train\.sbatch"):
        detect({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"})


def test_nothing_set_is_one_process() -> None:
    assert detect({}) == Launch("single", 0, 1, 0, "127.0.0.1:0")
