"""The lock of a run's directory: where that cannot be made, and the lease that takes its place without locks."""

from __future__ import annotations

import errno
import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from pipeline.runtime.launch import run_lock
from pipeline.runtime.launch.run_lock import exclusive_run, is_training
from tests.conftest import ROOT

SILENT_S = 2.0
HOLD = """
import sys
from pathlib import Path
from tests.run import test_lock
test_lock.without_locks()
with test_lock.exclusive_run(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def without_locks(patch: pytest.MonkeyPatch | None = None) -> None:
    """Takes this process's locks away, as of a file system that has none."""
    patch = patch or pytest.MonkeyPatch()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    patch.setattr(fcntl, "flock", refuse)
    patch.setattr(run_lock, "SILENT_S", SILENT_S)
    patch.setattr(run_lock, "_patience_s", lambda: 0.0)


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    # /proc passes os.access(W_OK) for root, and only the attempt fails
    for run_dir in (Path("/proc/run"), tmp_path / "file" / "run"):
        (tmp_path / "file").touch()
        with (
            pytest.raises(ConfigError, match=r"run.dir = .*\n.*cannot be written.*\n.*choose another run.dir"),
            exclusive_run(run_dir),
        ):
            pass


def test_without_locks_a_lease_refuses_a_second_run_and_ends_one_that_was_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    without_locks(monkeypatch)
    pipe = subprocess.PIPE
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    try:
        assert first.stdout.readline() == "held\n"
        assert is_training(tmp_path)
        with pytest.raises(ConfigError, match=f"another process is writing there: .*, pid {first.pid}\n"):
            exclusive_run(tmp_path).__enter__()
        first.send_signal(signal.SIGSTOP)
        with exclusive_run(tmp_path):
            assert f"counts as ended after {SILENT_S:g} s without a renewal" in capfd.readouterr().err
            assert is_training(tmp_path)
            first.send_signal(signal.SIGCONT)
            assert first.wait(timeout=60) == 2
        said = first.stderr.read()
        assert f"warning: {tmp_path}/.lock cannot be locked: its file system has no locks (No locks available)" in said
        assert f"error: {tmp_path}: another process has taken it over (lease 2; this one's was 1)" in said
        assert is_training(tmp_path) is False
    finally:
        first.kill()
        first.communicate()
