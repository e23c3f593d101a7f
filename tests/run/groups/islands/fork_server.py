"""Starts headrace commands by forking a process that has imported their modules; they can be killed one by one."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests import warm


class ForkServer:
    """A running server; what it has started is killed when this process ends."""

    def __init__(self) -> None:
        command, pipe = [sys.executable, "-m", "tests.run.groups.islands.fork_server"], subprocess.PIPE
        self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=warm.ROOT)
        self._running: set[int] = set()
        atexit.register(self._close)

    def kill_all(self) -> None:
        """Kills what still runs, and waits for its end."""
        for process in list(self._running):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            while self.code(process) is None:
                time.sleep(0.01)

    def _close(self) -> None:
        self.kill_all()
        self._server.kill()

    def start(self, *arguments: str, log: Path) -> int:
        """Starts `headrace ARGUMENTS`; returns its process id."""
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        process = int(self._ask({"start": ["-m", "headrace", *arguments], "log": str(log), "env": dict(os.environ)}))
        self._running.add(process)
        return process

    def code(self, process: int) -> int | None:
        """The exit code of a process; None while it runs."""
        code = self._ask({"code": process}) if process in self._running else 0
        if code is not None:
            self._running.discard(process)
        return code

    def _ask(self, job: dict[str, object]) -> int | None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        answer: int | None = json.loads(self._server.stdout.readline())
        return answer


@cache
def server() -> ForkServer:
    """The one of this process: its imports take seconds."""
    return ForkServer()


def main() -> None:
    """Serves until its input ends."""
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warm._import_for_training()
    for line in sys.stdin:
        job = json.loads(line)
        if "start" in job:
            answer: int | None = os.fork()
            if not answer:
                warm._become(job["start"], str(warm.ROOT), [job["log"]] * 2, job["env"])
        else:
            done, status = os.waitpid(job["code"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        print(json.dumps(answer), file=reply, flush=True)


if __name__ == "__main__":
    main()
