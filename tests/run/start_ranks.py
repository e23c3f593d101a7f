"""Starts of four ranks of which one is stopped on the way: `start_ranks.py PLACE:RANK ...`, several at a time.

Each leaves what its ranks said, and their exit codes, in a folder of its own. The ranks are forked after what takes
long: on a busy machine they would else not come within seconds of each other.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from foundation.cli import guarded, leave
from pipeline.config.sections.run import LaunchSection, WatchdogSection
from pipeline.config.topology import Topology
from pipeline.engines.parallel.mesh import Mesh
from pipeline.run import preflight, resume
from pipeline.runtime.faults.watchdog import run_watchdog
from pipeline.runtime.launch import detect, group, process_group, store
from pipeline.runtime.launch.group import free_port

RANKS = 4
TIMEOUT_S = 8.0
AT_A_TIME = 4
WRONG = "wrong"
"""Nobody is stopped: a rank adds up another number."""


def reached(place: str, how: str, bad: int) -> None:
    """Stops this process for ever when it is the one, and this the place."""
    if place == how and os.environ["RANK"] == str(bad):
        os.kill(os.getpid(), signal.SIGSTOP)


def prepare(how: str, bad: int) -> None:
    """Has the places where a rank may be stopped come by."""
    check, timed, connect = preflight._check, preflight._timed, group._connect
    open_store = store.open_store

    def checking(rendezvous: Any, axis: str, *others: Any) -> None:
        reached(axis, how, bad)
        wrong = how == WRONG and rendezvous.rank == bad and axis == "tp"
        check(replace(rendezvous, rank=77) if wrong else rendezvous, axis, *others)

    def timing(*arguments: Any) -> float:
        reached("timed", how, bad)
        return timed(*arguments)

    def opening(*arguments: Any) -> Any:
        opened = open_store(*arguments)
        reached("store", how, bad)
        return opened

    def connecting(*arguments: Any, **device: Any) -> None:
        reached("met", how, bad)
        connect(*arguments, **device)

    preflight._check, preflight._timed, group._connect = checking, timing, connecting
    resume._PATIENCE_S = 1.0  # that a file of one host may take to be seen on another
    store.open_store = opening


def start_up(how: str, bad: int) -> None:
    """All of a start until the watchdog is there."""
    launch = detect()
    prepare(how, bad)

    def make() -> Mesh:
        reached("groups", how, bad)
        return Mesh(Topology(dp=2, tp=2), device_type="cpu")

    reached("absent", how, bad)
    with process_group(launch, gpu=None, config=LaunchSection(timeout=TIMEOUT_S)) as rendezvous:
        line = preflight.preflight(rendezvous, make, device=torch.device("cpu"))[1]
        reached("shared", how, bad)
        resume.check_shared(Path.cwd(), rendezvous)
        reached("watched", how, bad)
        with run_watchdog(launch, rendezvous, config=WatchdogSection(), run_dir=Path.cwd()):
            print(line, flush=True)


@contextmanager
def started(case: str) -> Iterator[None]:
    how, bad = case.split(":")
    work, port = Path(case), free_port()
    work.mkdir()
    children = [fork(rank, how, int(bad), work, port) for rank in range(RANKS)]
    yield
    stopped = int(bad) if how != WRONG else -1
    for rank, child in enumerate(children):
        if rank != stopped:
            (work / f"code-{rank}").write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    if stopped >= 0:
        os.kill(children[stopped], signal.SIGKILL)
        os.waitpid(children[stopped], 0)


def fork(rank: int, how: str, bad: int, work: Path, port: int) -> int:
    if child := os.fork():
        return child
    os.chdir(work)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    said = os.open(f"said-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    return leave(guarded(lambda: start_up(how, bad)))


def together(cases: list[str]) -> None:
    if cases:
        with started(cases[0]):
            together(cases[1:])


if __name__ == "__main__":
    for first in range(1, len(sys.argv), AT_A_TIME):
        together(sys.argv[first : first + AT_A_TIME])
