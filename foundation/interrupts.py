"""Defers Ctrl-C while it would do harm."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def defer_interrupt(what: str) -> Iterator[None]:
    """Defers Ctrl-C until a block is done, then raises KeyboardInterrupt. A second Ctrl-C is not deferred.

    torch's writer of checkpoints wraps an interrupt into an error of its own, or aborts the process. This has no effect
    in threads other than the main one, inside another such block, or where the program handles SIGINT itself.

    Args:
        what: name of the work to finish first, for the message to the user.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            signal.default_int_handler(number, frame)
        asked = True
        if os.environ.get("RANK", "0") == "0":
            print(f"interrupted: {what} is finished first; Ctrl-C again to stop at once", file=sys.stderr, flush=True)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked:
        raise KeyboardInterrupt
