"""A command's process: quick imports, Ctrl-C that waits for what must be finished, errors of storage."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import threading
from collections.abc import Callable

import pytest
from safetensors import SafetensorError

from foundation.cli import guarded
from foundation.interrupts import defer_interrupt
from foundation.quick_imports import quick_imports


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_off_in_the_block_and_as_before_after_it(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with contextlib.suppress(ImportError), quick_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_block_is_finished_and_then_the_interrupt_comes(capsys: pytest.CaptureFixture[str]) -> None:
    done = []

    def work() -> None:
        with defer_interrupt("the work"):
            with defer_interrupt("a part of it"):
                interrupt()
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]
    assert "the work is finished first" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_does_not_wait() -> None:
    done = []

    def work() -> None:
        with defer_interrupt("the work"):
            interrupt()
            interrupt()
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == []


def test_an_error_in_the_block_is_not_hidden() -> None:
    def work() -> None:
        with defer_interrupt("the work"):
            interrupt()
            raise ValueError("the disk")

    with pytest.raises(ValueError, match="the disk"):
        work()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_that_handles_interrupts_itself_and_other_threads_are_let_be() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number))
    try:
        with defer_interrupt("the work"):
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]
    ended = []

    def elsewhere() -> None:
        with defer_interrupt("the work"):
            ended.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert ended == [signal.default_int_handler]


def raiser(error: Exception) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "out/file"),
            "out/file: No space left on device\n  try: free space",
        ),
        (
            SafetensorError("I/O error: No space left on device (os error 28)"),
            "No space left on device\n  try: free space",
        ),
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES), "out"),
            "out: Permission denied\n  try: check the path",
        ),
    ],
)
def test_a_storage_error_says_what_to_do(error: Exception, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raiser(error)) == 2
    assert f"error: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "gone"), SafetensorError("header too large")])
def test_other_errors_keep_their_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        guarded(raiser(error))
