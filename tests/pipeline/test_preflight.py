"""A rank that does not come, or does not answer, is named by the others within the timeout, with its host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.launch.group import free_port
from tests.conftest import ROOT

TIMEOUT_S = 6.0
# the time itself, 5 s until a stopped store is given up, 3 s in which ranks agree who is silent, and a busy machine
LIMIT_S = 120.0
BAD = 3
RANKS = """
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

how, bad = sys.argv[1], int(sys.argv[2])
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

# four ranks by fork, after what takes long: on a busy machine they would else not come within seconds of each other
children = []
for rank in range(4):
    if not (child := os.fork()):
        os.environ |= {{"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank)}}
        launch = detect()
        said = os.open(f"said-{{rank}}", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        leave(guarded(main))
    children.append(child)
for rank, child in enumerate(children):
    if rank != bad or how == "wrong":
        open(f"code-{{rank}}", "w").write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
if bad >= 0 and how != "wrong":
    os.kill(children[bad], signal.SIGKILL)
"""


def ranks(work: Path, how: str, *, bad: int) -> tuple[dict[int, str], dict[int, int]]:
    """Runs four ranks of which one misbehaves: what those said that ended by themselves, and their exit codes."""
    script = work / "ranks.py"
    script.write_text(RANKS.format(root=str(ROOT), timeout=TIMEOUT_S))
    port = str(free_port())
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, str(script), how, str(bad)]
    subprocess.run(command, env=environ, timeout=LIMIT_S, check=True, cwd=work)
    codes = {int(path.name.removeprefix("code-")): int(path.read_text()) for path in work.glob("code-*")}
    return {rank: (work / f"said-{rank}").read_text() for rank in codes}, codes


def test_ranks_that_all_answer_are_told_in_one_line(tmp_path: Path) -> None:
    said, codes = ranks(tmp_path, "fine", bad=-1)
    assert set(codes.values()) == {0}, said
    assert "preflight: dp 2, tp 2, all 4 ranks answer" in said[0]


@pytest.mark.parametrize("how", ["groups", "tp", "dp"])
def test_a_rank_that_is_stopped_is_named_with_its_host(tmp_path: Path, how: str) -> None:
    said, codes = ranks(tmp_path, how, bad=BAD)
    assert set(codes.values()) == {2}, said
    for text in said.values():
        assert f"rank {BAD} on {socket.gethostname()} did not answer" in text, said
        assert not any(f"rank {rank} on" in text for rank in range(3)), said
    if how == "tp":
        # the one that shares the axis says which axis it is
        assert "in the all-reduce over tp (ranks 2, 3)" in said[2]


def test_rank_0_takes_the_notes_with_it_and_is_named_all_the_same(tmp_path: Path) -> None:
    said, codes = ranks(tmp_path, "tp", bad=0)
    assert set(codes.values()) == {2}, said
    assert all(f"rank 0 on {socket.gethostname()} did not answer" in text for text in said.values()), said


@pytest.mark.parametrize("bad", [0, BAD])
def test_a_rank_that_never_comes_is_named(tmp_path: Path, bad: int) -> None:
    said, codes = ranks(tmp_path, "absent", bad=bad)
    assert set(codes.values()) == {2}, said
    words = "rank 0 never came" if bad == 0 else f"rank {BAD} of 4 never came"
    assert all(words in text for text in said.values()), said
    if bad:
        assert f"those that came: rank 0 on {socket.gethostname()}, rank 1" in said[0]


def test_a_wrong_sum_names_its_axis(tmp_path: Path) -> None:
    said, _ = ranks(tmp_path, "wrong", bad=BAD)
    # ranks 2 and 3 add up 3 and 4; rank 3 believes to be rank 77
    assert "all-reduce over tp (ranks 2, 3) is wrong" in said[2]
    assert "such as 81 where 7 is right" in said[2]
