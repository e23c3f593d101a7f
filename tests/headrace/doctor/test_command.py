"""The command line of doctor: what is wrong with it is said before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.errors import ConfigError
from foundation.slurm import run_slurm
from headrace.commands import app
from headrace.doctor import cluster
from headrace.doctor.cluster import find_nodes
from headrace.doctor.table import read_checks
from tests.conftest import tiny_config, write_config

DRY = ("gpus", "machine", "nodes", "versions", "compilers", "config")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "gpus,conection"], "did you mean 'connection'?"),
        (["--config", "absent.json"], "absent.json"),
        (["--config", "c.json", "--set", "zero_optimization.stge=1"], "did you mean 'stage'"),
        (["--config", "c.json", "--nproc", "3", "--only", "gpus"], "train_batch_size"),
        (["--set", "run.steps=3"], "there is no config"),
        (["--nproc", "0"], "--nproc = 0"),
        (["--out", "."], "none of an earlier doctor"),
        (["--out", "c.json"], "none of an earlier doctor"),
        (["--nodes", "4"], "(in a Slurm job: its nodes)"),
        (["--nodes", "a,b"], "(in a Slurm job: its nodes)"),
        (["--nprocs", "4"], "did you mean '--nproc'?"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "c.json", tiny_config(tmp_path / "tokens", tmp_path / "run"))
    assert app.run(["doctor", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


def test_a_rank_of_another_launcher_is_told_to_be_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert app.run(["doctor"]) == 2
    assert "unset RANK WORLD_SIZE" in capsys.readouterr().err


def test_the_checks_of_nodes_come_first_and_each_needs_only_earlier_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["doctor", "--list"]) == 0
    listed = [line[:16].rstrip() for line in capsys.readouterr().out.splitlines()]
    assert listed == [check.name for check in read_checks()]
    assert tuple(listed[: len(DRY)]) == DRY
    for number, check in enumerate(read_checks()):
        assert {*check.needs} <= {*listed[:number]}, check.name
        assert 60.0 <= check.limit_s <= 120.0


def test_nodes_are_those_of_the_slurm_job_in_its_order_with_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "".join(f"NodeName=n{n} Arch=x CoresPerSocket=1 NodeAddr=10.0.0.{n} NodeHostName=n{n}\n" for n in (1, 2, 3))
    done = run_slurm("printf", shown)
    monkeypatch.setattr(cluster, "run_slurm", lambda *_command: done)
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1"}.items():
        monkeypatch.setenv(name, value)
    found = find_nodes("n3,n2")
    assert (found.slurm, found.own, dict(found.addresses)) == (True, "10.0.0.1", {"n3": "10.0.0.3", "n2": "10.0.0.2"})
    assert [*find_nodes("2").addresses] == ["n1", "n2"]
    assert not find_nodes("n1").slurm  # this machine
    for asked in ("4", "n9"):
        with pytest.raises(ConfigError, match="there are n1, n2, n3"):
            find_nodes(asked)
    environ = {"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_CPUS_PER_NODE": "96(x2),64"}
    assert {"--gpus-per-node=8", "--cpus-per-task=64", "--ntasks=3", "--overlap"} <= {
        *cluster._srun(["n1", "n2", "n3"], environ)
    }
