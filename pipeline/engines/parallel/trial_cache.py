"""Results of derivations and trials on tiny models, kept on disk: a later check, and every rank of a run, read them.

A result is a file below HEADRACE_CACHE, named by a hash of what it depends on: the model's config, the layout, the
versions of torch and transformers, and the sources of headrace's engines and models. Only successes are kept. Ranks
that write one result at once replace each other's file in one step. A cache that cannot be read or written is not used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from foundation.directory import write_text
from foundation.remote_directory import cache_root

_SOURCES = ("engines", "models", "data")
_RESULT = "result"


def real_tensors() -> AbstractContextManager[None]:
    """A context in which a tiny model has real tensors, also inside a step on the fake device."""
    return _disable_current_modes()


def remembered(what: str, inputs: Sequence[str], compute: Callable[[], Any]) -> Any:
    """Returns a result from the disk, or else computes it and writes it there.

    Args:
        what: name of the computation.
        inputs: everything that the result depends on besides the versions and sources.
        compute: function that returns the result, a value that JSON can hold. Its exceptions are passed on.
    """
    digest = hashlib.sha256(json.dumps([what, code_version(), *inputs]).encode()).hexdigest()
    path = trials_folder() / f"{what}-{digest[:32]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads(path.read_text(encoding="utf-8"))[_RESULT]
    with real_tensors():
        result = compute()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({_RESULT: result}))
    return result


def trials_folder() -> Path:
    """Returns the directory of the results; it need not exist."""
    return cache_root() / "trials"


@cache
def code_version() -> str:
    """Returns the versions of torch and transformers, with a hash of the sources that plans and trials run (10 ms)."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return f"{version('torch')} {version('transformers')} {digest.hexdigest()}"
