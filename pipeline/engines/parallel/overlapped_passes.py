"""The backward pass of one micro-batch and the forward pass of another in turns, on one device.

Each pass has a thread, and one of the two runs at a time. Where a pass has begun an exchange it hands over to the other
one, and waits for the exchange when it is its turn again: so kernels of the other are between begin and end. A pass
whose other has ended, or that has none, waits at once. Turns do not depend on time: ranks that run the same two passes
issue all their collectives in the same order.

Both passes issue kernels to one stream, and on a GPU waiting for an exchange is waiting of that stream: the order of
kernels is what overlaps, not the threads. What a thread has of its own - dispatch modes, hooks of saved tensors, grad
mode - is each pass's own. torch runs the backward pass of a device in a worker thread, which is blocked while the
forward pass runs: a forward pass must not start a backward pass of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

T = TypeVar("T")

FORWARD, BACKWARD = 0, 1


def _nothing(_ending: int, _following: int) -> None: ...


class OverlappedPasses:
    """A runner of pairs of passes.

    Args:
        switched: callback between two turns, called with (the pass whose turn ends, the pass whose turn begins).
    """

    def __init__(self, *, switched: Callable[[int, int], None] = _nothing) -> None:
        self._switched = switched
        self._pair: _Pair | None = None

    def run(self, forward: Callable[[], T], backward: Callable[[], object]) -> T:
        """Runs a forward pass beside a backward pass, which begins.

        Returns:
            The result of `forward`.

        Raises:
            BaseException: the first error of the two; the other pass ends at its next exchange.
        """
        pair = self._pair = _Pair(self._switched)
        try:
            return pair.run(forward, backward)
        finally:
            self._pair = None

    def hand_over(self) -> None:
        """Lets the other pass run until its next exchange; returns at once where there is none."""
        if self._pair is not None:
            self._pair.hand_over()


class _Stopped(BaseException):
    """Ends a pass when the other one of the pair has failed."""


class _Pair:
    def __init__(self, switched: Callable[[int, int], None]) -> None:
        self._switched = switched
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._ended = [False, False]
        self._error: BaseException | None = None
        self._forward_thread = threading.get_ident()

    def run(self, forward: Callable[[], T], backward: Callable[[], object]) -> T:
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        modes = _get_current_dispatch_mode_stack()

        def beside() -> None:
            if device is not None:
                torch.accelerator.set_device_index(device)
            for mode in modes:
                _push_mode(mode)
            try:
                self._run(BACKWARD, backward)
            finally:
                for _ in modes:
                    _pop_mode()

        thread = threading.Thread(target=beside, name="backward pass", daemon=True)
        found: list[T] = []
        self._turns[BACKWARD].release()
        thread.start()
        self._run(FORWARD, lambda: found.append(forward()))
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:  # a signal's, in the main thread
                self._fail(error)
        if self._error is not None:
            raise self._error
        return found[0]

    def hand_over(self) -> None:
        # a device's backward pass runs in a thread of torch's, and recomputes there
        own = FORWARD if threading.get_ident() == self._forward_thread else BACKWARD
        other = 1 - own
        if self._error is not None:
            raise _Stopped
        if self._ended[other]:
            return
        self._switched(own, other)
        self._turns[other].release()
        self._wait(own)

    def _run(self, own: int, body: Callable[[], object]) -> None:
        try:
            self._wait(own)
            body()
        except _Stopped:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            self._ended[own] = True
            if not self._ended[1 - own]:
                if self._error is None:
                    self._switched(own, 1 - own)
                self._turns[1 - own].release()

    def _wait(self, own: int) -> None:
        self._turns[own].acquire()
        if self._error is not None:
            raise _Stopped

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
