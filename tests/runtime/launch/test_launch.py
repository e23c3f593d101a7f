"""The start of a rank: launcher, rank and backend from a launcher's variables; the rotation of its log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from pipeline.runtime.launch import Launch, detect
from pipeline.runtime.launch.group import backend_for
from pipeline.runtime.launch.log_file import LOG_FILE, rotate_log
from pipeline.runtime.launch.pod import PodPlace, place_of_pod
from pipeline.runtime.launch.rank_process import start_process, start_rank
from tests.conftest import tiny_config, write_config
from tests.support import refusal_of

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
# as Open MPI 4.1.4 and MPICH 4.0.2 (the same as Intel MPI's) were seen to set them
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "1169620993",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4", "PMI_FD": "6"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}
POD = {
    "PET_NNODES": "4",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29400",
}


def test_torchrun_and_deepspeed_are_detected_from_their_variables() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **MASTER}
    assert detect(environ) == Launch("environment", 3, 4, 1, "10.0.0.1:1234")
    assert detect({**environ, "TORCHELASTIC_RUN_ID": "x"}) == Launch("torchrun", 3, 4, 1, "10.0.0.1:1234")
    assert detect({**environ, "CROSS_RANK": "0"}) == Launch("deepspeed", 3, 4, 1, "10.0.0.1:1234")
    assert detect({**environ, "HEADRACE_NPROC": "4"}).launcher == "python --nproc"


def test_srun_is_detected_from_slurms_variables() -> None:
    assert detect({**SRUN, **MASTER}) == Launch("srun", 5, 8, 1, "10.0.0.1:1234")


def test_both_families_of_mpirun_are_detected_from_their_variables() -> None:
    assert detect({**OPEN_MPI, **MASTER}) == Launch("mpirun (Open MPI)", 3, 4, 3, "10.0.0.1:1234")
    assert detect({**HYDRA, **MASTER}) == Launch("mpirun (MPICH, Intel MPI)", 3, 4, 3, "10.0.0.1:1234")


@pytest.mark.parametrize("environ", [OPEN_MPI, HYDRA])
def test_mpirun_on_one_host_needs_no_address_and_its_ranks_agree_on_a_port(environ: dict[str, str]) -> None:
    first = {name: "0" if name.endswith(("RANK", "RANKID")) else value for name, value in environ.items()}
    masters = {detect(each, parent=77).master for each in (first, environ)}
    assert len(masters) == 1
    address, port = masters.pop().split(":")
    assert address == "127.0.0.1"
    assert 10000 <= int(port) < 30000


@pytest.mark.parametrize(("environ", "option"), [(OPEN_MPI, "-x MASTER_ADDR="), (HYDRA, "-genv MASTER_ADDR ")])
def test_mpirun_over_hosts_without_an_address_is_refused_with_the_option(environ: dict[str, str], option: str) -> None:
    spread = {name: "2" if "LOCAL" in name and name.endswith(("SIZE", "RANKS")) else v for name, v in environ.items()}
    with pytest.raises(ConfigError, match=option):
        detect(spread)


def test_mpirun_inside_a_slurm_job_is_detected_as_mpirun() -> None:
    # its helpers are started by srun, one per node, and pass their variables on
    assert detect({**SRUN, **OPEN_MPI, **MASTER}).rank == 3
    assert detect({**SRUN, **HYDRA, **MASTER}).rank == 3


def test_the_batch_script_of_a_slurm_job_is_a_single_process() -> None:
    # SLURM_PROCID and SLURM_NTASKS are set there too, but no other process was started
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).world_size == 1
    assert detect({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}).world_size == 1


def test_srun_without_a_rendezvous_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"slurm/train\.sbatch"):
        detect(SRUN)


def test_an_empty_environment_is_a_single_process() -> None:
    assert detect({}) == Launch("python", 0, 1, 0, "127.0.0.1:0")


def test_impossible_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
        detect({"RANK": "2", "WORLD_SIZE": "2", **MASTER})
    with pytest.raises(ConfigError, match="not a whole number"):
        detect({"RANK": "one", "WORLD_SIZE": "2", **MASTER})


def test_the_backend_follows_the_device() -> None:
    assert backend_for("auto", gpu=None, launcher="torchrun") == "gloo"
    assert backend_for("auto", gpu=0, launcher="torchrun") == "cpu:gloo,cuda:nccl"


def test_a_backend_that_is_not_available_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"launch\.backend = 'nccl'"):
        backend_for("nccl", gpu=None, launcher="torchrun")
    with pytest.raises(ConfigError, match=r"launch\.backend = 'mpi'"):
        backend_for("mpi", gpu=None, launcher="torchrun")


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


_IMPORT = "from pipeline.runtime.launch.log_file import rotate_log"
_WRITER = """
import os, subprocess, sys
from pipeline.runtime.launch.log_file import rotate_log

child = subprocess.Popen(["sh", "-c", "read line; echo child $line"], stdin=subprocess.PIPE)
for number in range(2000):
    print(f"line {number:04}", flush=True)
    rotate_log(limit=9000)
child.communicate(b"goes on\\n")
print("error", file=sys.stderr)
"""


def test_a_rank_keeps_the_end_of_its_log_and_what_was_before_and_its_children_go_on(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text("of an earlier start\n")
    rank = start_rank([sys.executable, "-c", _WRITER], 1, environ=os.environ, output=log, error=tmp_path / "error")
    assert rank.process.wait() == 0
    lines = [*(tmp_path / "rank-1.log.1").read_text().splitlines(), *log.read_text().splitlines()]
    assert lines[-2:] == ["child goes on", "error"]
    kept = [int(line.removeprefix("line ")) for line in lines[:-2]]
    assert kept == list(range(kept[0], 2000)), "a line was lost"
    assert 900 < len(kept) < 1900
    assert not list(tmp_path.glob("*.new"))


def test_a_log_that_somebody_else_has_opened_is_left_alone(tmp_path: Path) -> None:
    mine, other = tmp_path / "rank-1.log", tmp_path / "of-a-shell.log"
    mine.write_text("x" * 100)
    code = f"{_IMPORT}; print('y' * 100, flush=True); assert not rotate_log(limit=9)"
    for how in (">>", ">"):
        environ = {**os.environ, LOG_FILE: str(other if how == ">" else mine)}
        command = f'"{sys.executable}" -c "{code}" {how} {other}'
        subprocess.run(command, shell=True, check=True, env=environ)
    assert len(other.read_text()) == 101
    assert len(mine.read_text()) == 100
    assert not list(tmp_path.glob("*.1"))


def test_a_log_that_cannot_be_copied_stays_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank-1.log"
    log.parent.mkdir()
    log.with_name("rank-1.log.1.new").mkdir()  # as a full disk: the copy cannot be written
    code = f"{_IMPORT}; print('y' * 99, flush=True); print(rotate_log(limit=9))"
    environ = {**os.environ, LOG_FILE: str(log)}
    assert start_process([sys.executable, "-c", code], environ=environ, output=log).wait() == 0
    assert log.read_text() == f"{'y' * 99}\nFalse\n"


def test_without_a_log_nothing_is_done() -> None:
    assert not rotate_log({}, limit=0)


@pytest.mark.sweep
def test_a_training_run_rotates_the_log_of_a_rank(tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"a warning\n" * 2_000_000)
    command = [sys.executable, "-m", "pipeline.train", "--config", str(config)]
    rank = start_rank(command, 0, environ=os.environ, output=log, error=tmp_path / "error")
    assert rank.process.wait() == 0, rank.error_text()
    assert log.with_name("rank-0.log.1").stat().st_size >= 20_000_000
    assert log.stat().st_size < 100_000
    assert "step" in log.read_text()
