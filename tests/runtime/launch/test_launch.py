"""Detection of the launcher, the rank and the backend from the variables that each launcher sets."""

from __future__ import annotations

import pytest

from headrace.base.errors import ConfigError
from pipeline.runtime.launch import Launch, detect
from pipeline.runtime.launch.group import backend_for

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
