"""The executor for one machine: tasks in worker processes.

Workers are forked from a server process that has imported the map task and done nothing else: they start in
milliseconds and share no thread and no lock with the coordinator. They end with it, however it ends: each watches it
from a thread. Results come in the order of completion, which must not and does not matter.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, cast

from data_prep.executors.base import attempt, raise_failed
from data_prep.tasks.base import Report, Task
from headrace.errors import DataError


@dataclass(frozen=True)
class Local:
    """Worker processes on this machine."""

    workers: int

    def run(self, tasks: Sequence[Task], *, report: Report) -> Iterator[tuple[Task, dict[str, Any]]]:
        """See `Executor.run`. A worker that is killed is an error: what killed it would kill the next one, too."""
        return _run(tasks, workers=self.workers, report=report)


def _run(tasks: Sequence[Task], *, workers: int, report: Report) -> Iterator[tuple[Task, dict[str, Any]]]:
    pool: dict[Connection, tuple[ForkServerProcess, Task | None]] = {}
    waiting = list(reversed(tasks))
    try:
        for _ in range(min(workers, len(tasks))):
            connection, process = _start()
            pool[connection] = process, None
            _hand_out(pool, connection, waiting)
        while pool:
            for ready in wait(list(pool)):
                connection = cast(Connection, ready)
                process, task = pool[connection]
                assert task is not None
                kind, value = _receive(connection, process, task)
                if kind == "counts":
                    report(value)
                    continue
                raise_failed(task.name, kind, value)
                _hand_out(pool, connection, waiting)
                yield task, value
    finally:
        for process, _ in pool.values():
            process.kill()
        for process, _ in pool.values():
            process.join()


def warm_up() -> None:
    """Starts the server that workers are forked from: it imports while this process still looks at the inputs."""
    mp.get_context("forkserver").set_forkserver_preload(
        ["data_prep.executors.local", "data_prep.tasks.map", "fastokens"]
    )
    forkserver.ensure_running()


def _start() -> tuple[Connection, ForkServerProcess]:
    warm_up()
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _hand_out(
    pool: dict[Connection, tuple[ForkServerProcess, Task | None]], to: Connection, waiting: list[Task]
) -> None:
    process, _ = pool[to]
    if waiting:
        pool[to] = process, waiting.pop()
        to.send(pool[to][1])
    else:
        del pool[to]
        to.close()
        process.join()


def _receive(connection: Connection, process: ForkServerProcess, task: Task) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with code {code}"
        hint = "fewer --workers if memory ran out; run again to resume"
        raise DataError(f"the worker of {task.name} {how}\n  try: {hint}") from None
    return message


def _serve(connection: Connection) -> None:
    """A worker's life: tasks in, counts and results out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the coordinator ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task: Task = connection.recv()
        except EOFError:
            return
        connection.send(attempt(task, lambda counts: connection.send(("counts", counts))))


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
