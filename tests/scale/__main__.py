"""Measures parts at all of their sizes: `python -m tests.scale "PART" ...` prints a line of JSON for each.

Every size is measured in a process of its own, forked from this one, which has imported what the parts need.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from foundation.processes import raise_file_limit
from tests.scale.measuring import Figures, Part
from tests.scale.parts.all_parts import PARTS


def main() -> None:
    """Entry point; works in temporary directories, whose parent is TMPDIR."""
    raise_file_limit()
    for name in sys.argv[1:]:
        part, found, error = PARTS[name], {}, None
        for size in part.sizes:
            begun = time.monotonic()
            figures = in_a_process(part, size)
            print(f"{name}, {size:,} {part.unit}: {figures} after {time.monotonic() - begun:.0f} s", file=sys.stderr)
            if isinstance(figures, str):
                error = f"{size:,} {part.unit}: {figures}"
                break
            found[size] = asdict(figures)
        print(json.dumps({"part": name, "error": error, "figures": found}), flush=True)


def in_a_process(part: Part, size: int) -> Figures | str:
    """The figures of a size, or the last line of what went wrong."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        os.dup2(2, 1)  # what the product prints is not a result
        try:
            with tempfile.TemporaryDirectory(prefix="headrace-scale-", ignore_cleanup_errors=True) as work:
                told = json.dumps(asdict(part.run(size, Path(work))))
        except BaseException as error:
            traceback.print_exc()
            told = json.dumps(repr(error))
        os.write(writing, told.encode())
        os._exit(0)  # without thousands of threads and sockets of neighbours that are not there
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = json.loads(pipe.read() or b'"it was killed"')
    os.waitpid(child, 0)
    return told if isinstance(told, str) else Figures(**told)


if __name__ == "__main__":
    main()
