"""A real run under each launcher of one machine, and a rank that is killed or stopped in the middle of training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.base.errors import EXIT_LOST
from pipeline.faults.report import read_faults
from pipeline.launch.group import free_port
from tests.conftest import ROOT, launch, losses, tiny_config, write_config

START_S = 240.0
"""Until the first checkpoint, on a busy machine."""
GONE_S = 10.0
"""What a rank may take to go, after another one is known to be lost."""
SILENT_S = 4.0
TRAIN = str(ROOT / "pipeline/train.py")
LAUNCHERS = {
    "nproc": [sys.executable, TRAIN, "--nproc", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", TRAIN],
    "deepspeed": [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", "2", TRAIN],
}


@pytest.fixture
def config(tokens: Path, tmp_path: Path) -> Path:
    """A run without an end, on two ranks."""
    fields = tiny_config(tokens, tmp_path / "run", engine="torch", zero_optimization={"stage": 2})
    fields["run"] |= {"steps": 1_000_000, "checkpoint_every": 4}
    fields["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    fields["watchdog"] = {"heartbeat_timeout": SILENT_S}
    return write_config(tmp_path / "c.json", fields)


def ranks_of(config: Path) -> dict[int, int]:
    """Rank -> pid of the processes that train with a config: those with a rank and this config's directory."""
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


def hub_runs(work: Path) -> bool:
    """Whether a process of the watchdog still has a directory as its own."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (
                b"pipeline.faults.heartbeat_server" in (process / "cmdline").read_bytes()
                and (process / "cwd").readlink() == work
            ):
                return True
        except OSError:
            continue
    return False


def wait_for(condition: Callable[[], bool], *, within_s: float, what: str) -> None:
    """Waits until a condition holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s, what
        time.sleep(0.02)


def lose(config: Path, launcher: str, victim: int, how: signal.Signals) -> tuple[str, int]:
    """Trains; does something to one rank after the first checkpoint. Returns what was said and the exit code."""
    command = list(LAUNCHERS[launcher])
    if launcher == "deepspeed":
        command[1:1] = ["--master_port", str(free_port())]
    work = config.parent
    with (work / "said").open("w") as said:
        process = subprocess.Popen([*command, "--config", str(config)], stdout=said, stderr=said, cwd=work)
    try:
        checkpoints = work / "run/checkpoints"
        wait_for(
            lambda: process.poll() is not None or any(checkpoints.glob("step-*")),
            within_s=START_S,
            what="there was no checkpoint",
        )
        ranks = ranks_of(config)
        assert sorted(ranks) == [0, 1], (work / "said").read_text()
        time.sleep(3.0)  # signs of life come once per second: one from the midst of training
        os.kill(ranks[victim], how)
        patience = GONE_S + (SILENT_S if how is signal.SIGSTOP else 0)
        wait_for(lambda: not ranks_of(config), within_s=patience, what="ranks are left")
        wait_for(lambda: not hub_runs(work), within_s=GONE_S, what="the watchdog is left")
        process.wait(timeout=60)  # of which torchrun and deepspeed take 5 to 15 s for themselves
    finally:
        for pid in ranks_of(config).values():
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
    return (work / "said").read_text(), process.returncode


@pytest.mark.parametrize(
    ("launcher", "victim", "how"),
    [
        ("nproc", 0, signal.SIGKILL),
        ("nproc", 1, signal.SIGSTOP),
        ("torchrun", 1, signal.SIGKILL),
        ("deepspeed", 0, signal.SIGKILL),
    ],
)
def test_a_rank_that_is_lost_is_named_once_and_nothing_is_left_behind(
    config: Path, launcher: str, victim: int, how: signal.Signals
) -> None:
    said, code = lose(config, launcher, victim, how)
    reports = [line for line in said.splitlines() if line.startswith("error: rank")]
    assert len(reports) == 1, said
    assert reports[0].startswith(f"error: rank {victim} of 2 on ")
    assert "at step " in reports[0]
    assert ("silent" if how is signal.SIGSTOP else "died") in reports[0]
    assert "trainer.py" in said  # the stack
    assert "Connection closed by peer" not in said
    if launcher == "nproc":
        assert code == EXIT_LOST
    (fault,) = read_faults(config.parent / "run")
    assert fault["ranks"][0]["rank"] == victim
    goes_on(config)
    assert read_faults(config.parent / "run") == [fault]  # what was cut off with the steps is elsewhere


def goes_on(config: Path) -> None:
    """Starts the run again, to a nearby end."""
    fields = json.loads(config.read_text())
    fields["run"]["steps"] = max(losses(config.parent / "run")) + 8
    said = launch("train.py", write_config(config, fields))
    assert "resuming after step" in said
    assert "finished" in said
