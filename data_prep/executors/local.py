"""The executor for one machine: tasks in worker processes.

Workers are forked from a server process that has imported the map task and done nothing else: they start in
milliseconds and share no thread and no lock with the coordinator. They end with it, however it ends: each watches it
from a thread. Results come in the order of completion, which must not and does not matter.
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

from data_prep.executors.base import attempt, raise_failed
from data_prep.task import Counts, Report, Task
from headrace.base.errors import DataError

_PRELOADED = [
    *("data_prep.executors.local", "data_prep.tasks.map", "fastokens"),
    *("data_prep.tokenizer.given", "data_prep.tasks.tokenizer_sample"),
]
_TOLD_EVERY_S = 0.1


@dataclass
class _Worker:
    """A process that runs tasks, one after the other."""

    connection: Connection
    process: ForkServerProcess


class Local:
    """Worker processes on this machine, started when they are first needed and kept until the `with` block ends.

    What a task has loaded, a tokenizer before all, is there for the next one. Memory of a worker that is kept is what
    its largest task needed.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._idle: list[_Worker] = []

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        _end(self._idle)
        self._idle = []

    def run(self, tasks: Sequence[Task], *, report: Report) -> Iterator[tuple[Task, dict[str, Any]]]:
        """See `Executor.run`. A worker that is killed is an error: what killed it would kill the next one, too."""
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
                    raise_failed(task.name, kind, value)
                    del busy[worker.connection]
                    self._idle.append(worker)
                    yield task, value
        finally:
            _end([worker for worker, _ in busy.values()])


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.connection.close()


def warm_up() -> None:
    """Starts the server that workers are forked from: it imports while this process still looks at the inputs."""
    mp.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()


def _start() -> _Worker:
    warm_up()
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Worker(ours, process)


def _send(worker: _Worker, task: Task) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # an idle worker was killed: receiving will say so
        worker.connection.send(task)


def _receive(worker: _Worker, task: Task) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        code = worker.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with code {code}"
        hint = "fewer --workers if memory ran out; run again to resume"
        raise DataError(f"the worker of {task.name} {how}\n  try: {hint}") from None
    return message


def _serve(connection: Connection) -> None:
    """A worker's life: tasks in, counts and results out."""
    gc.freeze()  # what was imported stays, and need not be looked through again and again
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the coordinator ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task: Task = connection.recv()
        except EOFError:
            return
        counts = _Bundle(connection)
        outcome = attempt(task, counts.add)
        counts.send()
        connection.send(outcome)


class _Bundle:
    """Counts of a task on their way to the coordinator, which is not woken for each batch."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._counts, self._sent = Counts(), time.monotonic()

    def add(self, counts: Counts) -> None:
        self._counts = self._counts + counts
        if time.monotonic() - self._sent >= _TOLD_EVERY_S:
            self.send()

    def send(self) -> None:
        self._connection.send(("counts", self._counts))
        self._counts, self._sent = Counts(), time.monotonic()


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
