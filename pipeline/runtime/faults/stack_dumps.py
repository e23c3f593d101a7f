"""Stack dumps of a thread as a few lines of text: innermost call first, paths cut off before the package."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from types import FrameType

DEPTH = 10
"""Innermost calls that are shown; further out only calls of this package. A training step is 20 to 60 deep."""
_OWN_PACKAGE = "/pipeline/"
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)\b")
_CALL = re.compile(r'\s+File "(.*)", line (\d+) in (.*)')
_DEBUGGERS = ("bdb.py:", "pdb.py:", "debugpy/", "pydevd")
_WAITING = ("torch/distributed/", "deepspeed/comm/", "torch/cuda/streams.py:", "threading.py:", "selectors.py:")
_WRAPPERS = ("torch/nn/modules/module.py", "torch/utils/_contextlib.py", "transformers/utils/", "<string>", "<frozen")
"""Calls between any two layers of a model, which carry no information."""
_LIBRARIES = re.compile(r".*/(?:site-packages|dist-packages|lib/python3\.\d+)/")


def thread_stack(thread: int) -> tuple[str, ...]:
    """The innermost calls of a thread of this process, as "file:line in function"; empty when it has ended."""
    frame: FrameType | None = sys._current_frames().get(thread)
    lines: list[str] = []
    while frame is not None:
        code = frame.f_code
        lines += _call_lines(len(lines), code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return tuple(lines)


def parse_faulthandler_dump(dump: Iterable[str], *, thread: int) -> tuple[str, ...]:
    """The innermost calls of a thread, from the output of `faulthandler`, which needs no interpreter lock."""
    inside, lines = False, list[str]()
    for line in dump:
        if found := _THREAD.match(line):
            inside = int(found[1], 16) == thread
        elif inside and (call := _CALL.match(line)):
            lines += _call_lines(len(lines), call[1], int(call[2]), call[3])
    return tuple(lines)


def is_waiting(stack: Sequence[str]) -> bool:
    """Whether the innermost calls wait for other ranks, as far as Python can tell."""
    return any(mark in line for line in stack[:4] for mark in _WAITING)


def in_debugger(stack: Iterable[str]) -> bool:
    """Whether the thread is stopped in a Python debugger."""
    return any(mark in line for line in stack for mark in _DEBUGGERS)


def _call_lines(depth: int, path: str, number: int, function: str) -> list[str]:
    """A call as one line, or none where `depth` lines are enough."""
    in_library = _LIBRARIES.sub("", path)
    short = in_library if in_library != path else "/".join(path.rsplit("/", 3)[-3:])
    wanted = _OWN_PACKAGE in path if depth >= DEPTH else not short.startswith(_WRAPPERS)
    return [f"{short}:{number} in {function}"] if wanted else []
