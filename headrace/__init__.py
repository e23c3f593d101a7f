"""Headrace: from raw text to a small language model that serves. The Python API: `prepare_corpus`, `train`, `load`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foundation.version import __version__

if TYPE_CHECKING:
    from headrace.api import load, prepare_corpus, train

__all__ = ["__version__", "load", "prepare_corpus", "train"]


def __dir__() -> list[str]:
    """Lists the functions, which are not imported before their first use."""
    return [*__all__]


def __getattr__(name: str) -> Any:
    """Returns the functions of `headrace.api`, which is imported at their first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headrace import api  # noqa: PLC0415

    return getattr(api, name)
