"""Imports of large libraries, without the work of Python's garbage collector, and without what they import in vain."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_IN_VAIN = {"mlflow"}


@contextmanager
def quick_imports() -> Iterator[None]:
    """Turns off the cyclic garbage collector for the imports in a block, and permanently exempts their objects from it.

    Importing torch and transformers makes 600,000 objects that all stay. The collector scans them again and again,
    which took 1.0 of 4.4 s of CPU. After freezing, later collections skip them, too. DeepSpeed would import mlflow,
    where it is installed, for its autotuner: another second.
    """
    enabled, hidden = gc.isenabled(), _IN_VAIN - sys.modules.keys()
    gc.disable()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: an import of it fails
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
        if enabled:
            gc.freeze()
            gc.enable()
