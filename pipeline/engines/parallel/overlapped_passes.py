"""Runs the backward pass of one micro-batch and the forward pass of another in turns, on one device.

Each pass has a thread; only one of them runs at a time. A pass that has begun an exchange lets the other pass run, and
waits for the exchange in its next turn. So kernels of the other pass run between begin and end of the exchange. If the
other pass has ended or does not exist, the pass waits at once. Turns do not depend on time: ranks that run the same two
passes issue all their collectives in the same order.

Both passes issue kernels to one stream, and on a GPU the stream waits for an exchange. The overlap therefore comes from
the order of kernels, not from the threads. Each pass has its own thread-local state: dispatch modes, hooks of saved
tensors, grad mode. torch runs the backward pass of a device in a worker thread, which is blocked while the forward pass
runs. A forward pass must therefore not start a backward pass.
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
        """Runs a forward pass beside a backward pass; the backward pass has the first turn.

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
        """Lets the other pass run until its next exchange; returns at once if there is no other pass."""
        if self._pair is not None:
            self._pair.hand_over()


class _Stopped(BaseException):
    """Ends a pass when the other pass of the pair has failed."""


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
            except BaseException as error:  # may be a signal's, in the main thread
                self._fail(error)
        if self._error is not None:
            raise self._error
        return found[0]

    def hand_over(self) -> None:
        # a device's backward pass, and its recomputation, run in a thread of torch
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
