"""Ctrl-C waits for what must be finished, once; a second one does not wait."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from foundation.interrupts import defer_interrupt


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
