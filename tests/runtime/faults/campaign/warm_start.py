"""Fast `--nproc`: launcher and ranks are forked from a process that has done the imports (as in `tests/warm.py`).

A start costs a core 13 s, nearly all of it imports, and every fault needs a start. The launcher runs
`pipeline.runtime.launch.local` unchanged, except that it forks a rank instead of executing python. Forked processes
have the server's command line and environment in /proc: they are identified by their working directory, and ranks by
pid files.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.warm_python import ROOT
from tests.warm_python.imports import import_for_training
from tests.warm_python.server import become

_POLL_S = 0.02


class Warm:
    """A started launcher, with the part of `subprocess.Popen`'s interface that the campaign uses."""

    def __init__(self, command: Sequence[str], *, work: Path, env: Mapping[str, str], output: Path) -> None:
        self.returncode: int | None = None
        for old in (work / "tmp").glob("rank-*"):
            old.unlink()
        job = {"command": list(command[1:]), "work": str(work), "env": dict(env), "output": str(output)}
        self.pid = _server().start(job)

    def poll(self) -> int | None:
        self.returncode = _server().codes.get(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal; without effect when it has exited."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def pids_of_ranks(work: Path) -> dict[int, int]:
    """Rank -> process id of the last start; they may have exited."""
    found = {}
    for path in (work / "tmp").glob("rank-*"):
        with suppress(OSError, ValueError):
            found[int(path.name.removeprefix("rank-"))] = int(path.read_text())
    return found


class _Server:
    """Client of the fork server."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self._started: list[int] = []
        self._lock, self._answered = threading.Lock(), threading.Semaphore(0)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "tests.runtime.faults.campaign.warm_start"]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=env)
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, job: Mapping[str, Any]) -> int:
        with self._lock:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            assert self._answered.acquire(timeout=300.0)
            return self._started.pop()

    def _listen(self) -> None:
        for line in self._process.stdout:
            pid, code = json.loads(line)
            if code is None:
                self.codes.pop(pid, None)  # process ids are reused
                self._started.append(pid)
                self._answered.release()
            else:
                self.codes[pid] = code


_STARTING = threading.Lock()


def _server() -> _Server:
    with _STARTING:  # without the lock two threads could start two servers
        return _only_server()


@cache
def _only_server() -> _Server:
    return _Server()


class _Rank:
    """Replacement of `subprocess.Popen` in the launcher."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: Any,
        preexec_fn: Callable[[], None],
        **_: Any,
    ) -> None:
        self.returncode: int | None = None
        output = Path(f"/proc/{os.getpid()}/fd/{1 if stdout is None else stdout.fileno()}").readlink()
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            preexec_fn()
            Path(env["TMPDIR"], f"rank-{env['RANK']}").write_text(str(os.getpid()))
            _run(words[1:], str(Path.cwd()), str(output), env)

    def poll(self) -> int | None:
        if self.returncode is None:
            with suppress(ChildProcessError):
                done, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def wait(self) -> None:
        if self.poll() is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(words: Sequence[str], work: str, output: str, env: Mapping[str, str]) -> None:
    request = {"program": "python", "arguments": words, "environ": env, "cwd": work, "files": [0, 1, 2]}
    files = [os.open(os.devnull, os.O_RDONLY), *(os.open(output, os.O_WRONLY | os.O_APPEND) for _ in range(2))]
    become({**request, "limits": {}, "umask": 0o022}, files, sys.executable, lambda: None)


def _fork(job: Mapping[str, Any]) -> int:
    child = os.fork()
    if not child:
        from pipeline.runtime.launch import rank_process  # noqa: PLC0415

        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stand_in = SimpleNamespace(Popen=_Rank, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
        rank_process.subprocess = stand_in  # type: ignore[attr-defined]
        _run(job["command"], job["work"], job["output"], job["env"])
    return child


def main() -> None:
    """Serves until stdin closes: takes jobs, answers [pid, null], and [pid, exit code] at the end of each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the campaign
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_for_training()

    def answer(pid: int, code: int | None) -> None:
        print(json.dumps([pid, code]), file=answers, flush=True)

    while True:
        if select.select([sys.stdin], [], [], _POLL_S)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            answer(_fork(json.loads(line)), None)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                answer(ended[0], os.waitstatus_to_exitcode(ended[1]))


if __name__ == "__main__":
    main()
