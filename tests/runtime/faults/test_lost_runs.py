"""A real run under each launcher, and a rank that is killed or stopped in the middle of training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foundation.errors import EXIT_LOST
from pipeline.runtime.faults.report import read_faults
from pipeline.runtime.launch.group import free_port
from tests.conftest import ROOT, launch, losses, tiny_config, write_config
from tests.support import wait_until

START_S = 240.0
"""Until the first checkpoint, on a busy machine."""
EXIT_S = 60.0
"""Seconds in which ranks exit, after another one is known to be lost."""
SILENT_S = 4.0
TRAIN = str(ROOT / "pipeline/train.py")
LAUNCHERS = {
    "nproc": [sys.executable, TRAIN, "--nproc", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", TRAIN],
    "deepspeed": [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", "2", TRAIN],
}


@pytest.fixture
def config(tokens: Path, tmp_path: Path) -> Path:
    """A run of a million steps, on two ranks."""
    fields = tiny_config(tokens, tmp_path / "run", engine="torch", zero_optimization={"stage": 2})
    fields["run"] |= {"steps": 1_000_000, "checkpoint_every": 4}
    fields["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    fields["watchdog"] = {"heartbeat_timeout": SILENT_S}
    return write_config(tmp_path / "c.json", fields)


def ranks_of(config: Path) -> dict[int, int]:
    """Rank -> pid of the processes that train with a config: those with a rank in the environment and this config."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
            environ = (process / "environ").read_bytes().decode().split("\0")
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended meanwhile
            continue
        rank = next((each.removeprefix("RANK=") for each in environ if each.startswith("RANK=")), None)
        if rank is not None and str(config) in words and TRAIN in words and state != "Z":
            found[int(rank)] = int(process.name)
    return found


def server_runs(work: Path) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (
                b"pipeline.runtime.faults.heartbeat_server" in (process / "cmdline").read_bytes()
                and (process / "cwd").readlink() == work
            ):
                return True
        except OSError:
            continue
    return False


def lose_rank(config: Path, launcher: str, victim: int, how: signal.Signals) -> tuple[str, int]:
    """Trains; sends one rank a signal after the first checkpoint. Returns the output and the exit code."""
    command = list(LAUNCHERS[launcher])
    if launcher == "deepspeed":
        command[1:1] = ["--master_port", str(free_port())]
    work = config.parent
    with (work / "output").open("w") as output:
        process = subprocess.Popen([*command, "--config", str(config)], stdout=output, stderr=output, cwd=work)
    try:
        checkpoints = work / "run/checkpoints"
        wait_until(
            lambda: process.poll() is not None or any(checkpoints.glob("step-*")),
            within_s=START_S,
            said=lambda: "there was no checkpoint",
        )
        ranks = ranks_of(config)
        assert sorted(ranks) == [0, 1], (work / "output").read_text()
        time.sleep(3.0)  # heartbeats come once per second: one from the middle of training
        os.kill(ranks[victim], how)
        limit_s = EXIT_S + (SILENT_S if how is signal.SIGSTOP else 0)
        wait_until(lambda: not ranks_of(config), within_s=limit_s, said=lambda: "ranks are left")
        wait_until(lambda: not server_runs(work), within_s=EXIT_S, said=lambda: "the watchdog is left")
        process.wait(timeout=300)  # of which torchrun and deepspeed take 5 to 15 s for themselves
    finally:
        for pid in ranks_of(config).values():
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
    return (work / "output").read_text(), process.returncode


@pytest.mark.parametrize(
    ("launcher", "victim", "how"),
    [
        pytest.param("nproc", 0, signal.SIGKILL, marks=pytest.mark.sweep),
        pytest.param("nproc", 1, signal.SIGSTOP, marks=pytest.mark.sweep),
        pytest.param("torchrun", 1, signal.SIGKILL, marks=pytest.mark.sweep),
        ("deepspeed", 0, signal.SIGKILL),
    ],
)
def test_a_lost_rank_is_reported_and_all_exit(config: Path, launcher: str, victim: int, how: signal.Signals) -> None:
    output, code = lose_rank(config, launcher, victim, how)
    reports = [line for line in output.splitlines() if line.startswith("error: rank")]
    assert len(reports) == 1, output
    assert reports[0].startswith(f"error: rank {victim} of 2 on ")
    assert "at step " in reports[0]
    assert ("has sent no heartbeat" if how is signal.SIGSTOP else "died") in reports[0]
    assert "trainer.py" in output  # the stack
    assert "Connection closed by peer" not in output
    if launcher == "nproc":
        assert code == EXIT_LOST
    (fault,) = read_faults(config.parent / "run")
    assert fault["ranks"][0]["rank"] == victim
    resume(config)
    assert read_faults(config.parent / "run") == [fault]  # faults are not truncated with the steps


def resume(config: Path) -> None:
    fields = json.loads(config.read_text())
    fields["run"]["steps"] = max(losses(config.parent / "run", written=False)) + 8
    output = launch("train.py", write_config(config, fields))
    assert "resuming after step" in output
    assert "finished" in output
