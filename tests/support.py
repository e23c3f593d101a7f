"""What tests of many folders do: wait for processes, kill them, read exit codes, damage files, answer HTTP requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from pipeline.runtime.metrics.journal import read_rows
from tests.warm_python import real_pid


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    """The standard output of a process that has succeeded."""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-8000:]
    return done.stdout


def refusal_of(done: subprocess.CompletedProcess[str]) -> str:
    """What a process that refused its input (exit code 2) wrote to stderr, or to stdout where both are one."""
    assert done.returncode == 2, f"{done.stdout}\n{done.stderr}"[-8000:]
    return done.stdout if done.stderr is None else done.stderr


def wait_until(
    condition: Callable[[], object],
    *,
    within_s: float = 300.0,
    process: subprocess.Popen[str] | subprocess.Popen[bytes] | None = None,
    said: Callable[[], object] = lambda: None,
    poll_s: float = 0.05,
) -> None:
    """Waits for a condition; fails with what `said` returns after `within_s` seconds, or once `process` has ended."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert process is None or process.poll() is None, f"it ended before that: {said()}"
        assert time.monotonic() < deadline, f"waited for {within_s} s: {said()}"
        time.sleep(poll_s)


def last_step(run_dir: Path) -> int:
    """The last step in a run's journal, 0 where there is none yet."""
    if not (run_dir / "metrics.jsonl").exists():
        return 0
    return max((row["step"] for row in read_rows(run_dir, kind="step")), default=0)


def kill(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Kills a process with SIGKILL; returns when its locks are free, also those of the process it stands for."""
    real = Path("/proc", str(real_pid(process.pid)))
    process.kill()
    process.wait()
    wait_until(lambda: not real.exists())  # as a zombie it may still have threads, and those its files


def kill_group(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Kills a process and all of its session with SIGKILL."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def flip_a_byte(path: Path, *, at: float = 0.5) -> None:
    """Damages a file by one bit, at some fraction of it."""
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1
    path.write_bytes(data)


def respond(handler: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str]) -> None:
    """Sends a whole body of a known length; none to HEAD."""
    handler.send_response(status)
    for key, value in (headers | {"Content-Length": str(len(content))}).items():
        handler.send_header(key, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(content)


def respond_json(
    handler: BaseHTTPRequestHandler, status: int, value: Any, headers: dict[str, str] | None = None
) -> None:
    respond(handler, status, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))
