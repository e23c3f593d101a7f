"""Four forked ranks with one all-reduce per step, and a fault injected into one of them: `ranks.py FAULT BAD_RANK`."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from foundation.cli import guarded, leave
from foundation.errors import TrainingError
from foundation.processes import STOPPED, TRACED, state_of
from pipeline.config.sections.run import LaunchSection, WatchdogSection
from pipeline.runtime.faults.monitor import Monitor
from pipeline.runtime.faults.watchdog import Watchdog, run_watchdog
from pipeline.runtime.launch import Launch, detect, process_group
from pipeline.runtime.launch.group import free_port

RANKS = 4
LIMITS = {
    "stuck": {"hang_timeout": 6.0},
    "holds lock": {"hang_timeout": 6.0},
}
SILENT_S = 3.0
STEPS = 6


def sleep_with_the_lock(seconds: int) -> None:
    """Sleeps like a C extension that does not release Python's interpreter lock (GIL)."""
    ctypes.PyDLL(None).sleep(seconds)


def kill_server() -> None:
    """Kills the heartbeat server beside this process, as the loss of its host would."""
    subprocess.run(
        ["pkill", "-9", "-P", str(os.getpid()), "-f", "pipeline.runtime.faults.heartbeat_server"], check=True
    )


def kill_host() -> None:
    """Kills what the loss of rank 0's host would: the server and rank 0."""
    kill_server()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_server_then_host() -> None:
    """Kills the server first; all ranks have noticed before rank 0 is killed, too."""
    kill_server()
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def cut_links() -> None:
    """Closes the connections to other ranks, as a network may; ranks, watchdog and store stay alive."""
    watchdog = next(thread for thread in threading.enumerate() if isinstance(thread, Monitor))
    store, server = int(os.environ["MASTER_PORT"]), watchdog._socket.getpeername()[1]
    for each in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError), socket.socket(fileno=os.dup(int(each.name))) as link:
            if not {store, server} & {link.getsockname()[1], link.getpeername()[1]}:
                link.shutdown(socket.SHUT_RDWR)


def fail() -> None:
    raise ValueError("the real cause")


def refuse() -> None:
    raise TrainingError("all raise this\n  try: something else")


FAULTS: dict[str, Callable[[], None]] = {
    "fine": lambda: None,
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stuck": lambda: time.sleep(600),
    "holds lock": lambda: sleep_with_the_lock(600),
    "holds lock, shortly": lambda: sleep_with_the_lock(2 * int(SILENT_S)),
    "raise": fail,
    "refuse": refuse,
    "link": cut_links,
    "paused": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "server": kill_server,
    "host": kill_host,
    "server, host": kill_server_then_host,
}
"""Fault -> what the bad rank, or every rank, does in the third step."""


def train(launch: Launch, fault: str, bad: int) -> None:
    """Steps of one all-reduce each."""
    limits = WatchdogSection(**{"heartbeat_timeout": SILENT_S, "hang_timeout": 600.0, **LIMITS.get(fault, {})})
    with process_group(launch, gpu=None, config=LaunchSection(timeout=600)) as rendezvous:
        dist.barrier()
        with run_watchdog(launch, rendezvous, config=limits, run_dir=Path.cwd()) as watchdog, watchdog:
            for step in range(1, STEPS + 1):
                do_step(watchdog, step, FAULTS[fault] if launch.rank == bad or bad < 0 else FAULTS["fine"])


def do_step(watchdog: Watchdog, step: int, inject_fault: Callable[[], None]) -> None:
    """One step; in the third one the fault is injected."""
    watchdog.enter_phase("training", step)
    if step == 3:
        time.sleep(2.0)  # so that every rank has sent a heartbeat
        inject_fault()
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)


def main() -> None:
    """Forks the ranks; writes `output-RANK` and `code-RANK` into the working directory."""
    fault, bad = sys.argv[1], int(sys.argv[2])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)  # the server outlives rank 0: it becomes a child of this process
    children = [start(rank, fault, bad) for rank in range(RANKS)]
    if fault == "paused":
        pause(children, SILENT_S + 2.0)
    codes = {}
    with suppress(ChildProcessError):  # no child is left
        while True:
            child, status = os.wait()
            codes[child] = os.waitstatus_to_exitcode(status)
    for rank, child in enumerate(children):
        Path(f"code-{rank}").write_text(str(codes[child]))


def pause(children: list[int], seconds: float) -> None:
    """Waits until all are stopped, continues them after `seconds`, and traces one of them for as long again."""
    while not all(state_of(child)[0] == STOPPED for child in children):
        time.sleep(0.01)
    time.sleep(seconds)
    for child in children:
        os.kill(child, signal.SIGCONT)
    attach, detach, all_threads = 16, 17, 0x40000000
    threads = [int(each.name) for each in Path(f"/proc/{children[1]}/task").iterdir()]
    for thread in threads:
        if ctypes.CDLL(None).ptrace(attach, thread, None, None) == 0:  # else it has ended meanwhile
            os.waitpid(thread, all_threads)
    assert state_of(children[1])[0] == TRACED
    time.sleep(seconds)
    for thread in threads:
        ctypes.CDLL(None).ptrace(detach, thread, None, None)


def start(rank: int, fault: str, bad: int) -> int:
    """Forks one rank; returns its pid."""
    if child := os.fork():
        return child
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    output = os.open(f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    return leave(guarded(lambda: train(detect(), fault, bad)))


if __name__ == "__main__":
    main()
