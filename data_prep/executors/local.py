"""The executor for one machine: tasks in worker processes.

Workers are forked from a fork server that has imported the map task and done nothing else: they start in milliseconds
and share no thread and no lock with the coordinator. They end with the coordinator, even if it is killed: a thread in
each worker waits for its exit. Results come in the order of completion; the output does not depend on it.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any, cast

from data_prep.executors.base import LostWorkerError, attempt_task, raise_if_failed
from data_prep.task import Counts, Report, Task

_PRELOADED = [
    *("data_prep.executors.local", "data_prep.tasks.map", "fastokens"),
    *("data_prep.tokenizer.existing", "data_prep.tasks.tokenizer_sample"),
]
_REPORT_INTERVAL_S = 0.1


@dataclass
class _Worker:
    """A process that runs one task at a time."""

    connection: Connection
    process: ForkServerProcess


class LocalExecutor:
    """Worker processes on this machine, started when first needed and reused until the `with` block ends.

    A tokenizer or other object that a task has loaded stays loaded for the next task. An idle worker keeps the memory
    that its largest task needed.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._idle: list[_Worker] = []

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        _kill(self._idle)
        self._idle = []

    def run(self, tasks: Sequence[Task], *, report: Report) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Implements `Executor.run`. A killed worker's task is not retried: the cause would kill another worker."""
        busy: dict[Connection, tuple[_Worker, Task]] = {}
        waiting = list(reversed(tasks))
        try:
            while waiting or busy:
                while waiting and len(busy) < self.workers:
                    worker, task = self._idle.pop() if self._idle else _start(), waiting.pop()
                    busy[worker.connection] = worker, task
                    _send(worker, task)
                for ready in wait(list(busy)):
                    worker, task = busy[cast(Connection, ready)]
                    kind, value = _receive(worker, task)
                    if kind == "counts":
                        report(value)
                        continue
                    raise_if_failed(task.name, kind, value)
                    del busy[worker.connection]
                    self._idle.append(worker)
                    yield task, value
        finally:
            _kill([worker for worker, _ in busy.values()])


def _kill(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.connection.close()


def start_fork_server() -> None:
    """Starts the fork server of the workers: its imports overlap with this process's check of the inputs."""
    mp.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()


def _start() -> _Worker:
    start_fork_server()
    context = mp.get_context("forkserver")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end,), daemon=True)
    process.start()
    child_end.close()
    return _Worker(parent_end, process)


def _send(worker: _Worker, task: Task) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # an idle worker was killed: `_receive` raises
        worker.connection.send(task)


def _receive(worker: _Worker, task: Task) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        code = worker.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        hint = "fewer --workers if memory ran out; run again to resume"
        raise LostWorkerError(f"the worker of {task.name} {how}\n  try: {hint}") from None
    return message


def _serve(connection: Connection) -> None:
    """The main loop of a worker: receives tasks, sends counts and results."""
    gc.freeze()  # imported modules stay: the garbage collector need not scan them
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the coordinator ends the workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    while True:
        try:
            task: Task = connection.recv()
        except EOFError:
            return
        counts = _CountsSender(connection)
        outcome = attempt_task(task, counts.add)
        counts.send()
        connection.send(outcome)


class _CountsSender:
    """Sends a task's counts to the coordinator, summed over `_REPORT_INTERVAL_S`: no message for each batch."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._counts, self._sent = Counts(), time.monotonic()

    def add(self, counts: Counts) -> None:
        self._counts = self._counts + counts
        if time.monotonic() - self._sent >= _REPORT_INTERVAL_S:
            self.send()

    def send(self) -> None:
        self._connection.send(("counts", self._counts))
        self._counts, self._sent = Counts(), time.monotonic()


def _exit_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
