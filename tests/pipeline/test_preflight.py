"""A rank that does not come, or does not answer, is named by the others within the timeout, with its host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

TIMEOUT_S = 6.0
# the time itself, 5 s until a stopped store is given up, 3 s in which ranks agree who is silent, and a busy machine
LIMIT_S = 60.0
BAD = 3
RANK = """
import os, signal, sys, time
from dataclasses import replace
sys.path.insert(0, {root!r})
import torch
from headrace.cli import guarded, leave
from pipeline import preflight
from pipeline.config.schema import LaunchSection
from pipeline.launch import detect, process_group
from pipeline.parallel.mesh import Mesh
from pipeline.topology import Topology

launch, how, bad = detect(), sys.argv[1], int(sys.argv[2])
check = preflight._check

def stop(when):
    if launch.rank == bad and how == when:
        os.kill(os.getpid(), signal.SIGSTOP)

def checking(meeting, axis, group, device):
    stop(axis)
    if launch.rank == bad and how == "wrong" and axis == "tp":
        meeting = replace(meeting, rank=77)
    check(meeting, axis, group, device)

def make():
    stop("groups")
    return Mesh(Topology(dp=2, tp=2), device_type="cpu")

def main():
    preflight._check = checking
    stop("absent")
    with process_group(launch, gpu=None, config=LaunchSection(timeout={timeout})) as meeting:
        print(preflight.preflight(meeting, make, device=torch.device("cpu"))[1], flush=True)

leave(guarded(main))
"""


def ranks(work: Path, how: str, *, bad: int) -> tuple[dict[int, str], dict[int, int], float]:
    """Starts four ranks of which one misbehaves: what the others said, their exit codes, seconds until the last."""
    script = work / "rank.py"
    script.write_text(RANK.format(root=str(ROOT), timeout=TIMEOUT_S))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    base = {**os.environ, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    base["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    command = [sys.executable, str(script), how, str(bad)]
    pipe, started = subprocess.PIPE, time.monotonic()
    processes = [
        subprocess.Popen(command, env={**base, "RANK": str(rank)}, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        for rank in range(4)
    ]
    try:
        others = {rank: process for rank, process in enumerate(processes) if rank != bad}
        said = {rank: process.communicate(timeout=LIMIT_S)[0] for rank, process in others.items()}
        seconds = time.monotonic() - started
        if how == "wrong":
            said[bad] = processes[bad].communicate(timeout=LIMIT_S)[0]
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return said, {rank: process.returncode for rank, process in others.items()}, seconds


def test_ranks_that_all_answer_are_told_in_one_line(tmp_path: Path) -> None:
    said, codes, _ = ranks(tmp_path, "fine", bad=-1)
    assert set(codes.values()) == {0}, said
    assert "preflight: dp 2, tp 2, all 4 ranks answer" in said[0]


@pytest.mark.parametrize("how", ["groups", "tp", "dp"])
def test_a_rank_that_is_stopped_is_named_with_its_host(tmp_path: Path, how: str) -> None:
    said, codes, seconds = ranks(tmp_path, how, bad=BAD)
    assert set(codes.values()) == {2}, said
    for text in said.values():
        assert f"rank {BAD} on {socket.gethostname()} did not answer" in text, said
        assert not any(f"rank {rank} on" in text for rank in range(3)), said
    if how == "tp":
        # the one that shares the axis says which axis it is
        assert "in the all-reduce over tp (ranks 2, 3)" in said[2]
    assert seconds < LIMIT_S


def test_rank_0_takes_the_notes_with_it_and_is_named_all_the_same(tmp_path: Path) -> None:
    said, codes, _ = ranks(tmp_path, "tp", bad=0)
    assert set(codes.values()) == {2}, said
    assert all(f"rank 0 on {socket.gethostname()} did not answer" in text for text in said.values()), said


@pytest.mark.parametrize("bad", [0, BAD])
def test_a_rank_that_never_comes_is_named(tmp_path: Path, bad: int) -> None:
    said, codes, _ = ranks(tmp_path, "absent", bad=bad)
    assert set(codes.values()) == {2}, said
    words = "rank 0 never came" if bad == 0 else f"rank {BAD} of 4 never came"
    assert all(words in text for text in said.values()), said
    if bad:
        assert f"those that came: rank 0 on {socket.gethostname()}, rank 1" in said[0]


def test_a_wrong_sum_names_its_axis(tmp_path: Path) -> None:
    said, _, _ = ranks(tmp_path, "wrong", bad=BAD)
    # ranks 2 and 3 add up 3 and 4; rank 3 believes to be rank 77
    assert "all-reduce over tp (ranks 2, 3) is wrong" in said[2]
    assert "such as 81 where 7 is right" in said[2]
