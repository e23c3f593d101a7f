"""Imports of modules that have moved: the error says the new name.

`moved.txt` has a line "OLD NEW" for every module. It is read only when an import has failed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_NOW_PACKAGES = {
    "data_prep.config": "data_prep.config.corpus",
    "data_prep.job": "data_prep.job.directory",
    "data_prep.packing": "data_prep.packing.pack",
}
"""Modules that are packages now, and the module in them that has their names."""


def say_new_names() -> None:
    """Has imports of old names say the new ones. Called by every package of ours, with effect once."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedFinder())


@cache
def moved() -> dict[str, str]:
    """Old name -> new name."""
    lines = Path(__file__).with_suffix(".txt").read_text().splitlines()
    return {old: new for old, _, new in (line.partition(" ") for line in lines)}


class _MovedFinder:
    """The last finder: it is asked for what no other one has found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds nothing.

        Raises:
            ModuleNotFoundError: the module has moved. Without a `name`, or `from PACKAGE import MODULE` would hide it.
        """
        del target
        if name.partition(".")[0] not in ("headrace", "data_prep", "pipeline"):
            return None
        if name in moved():
            raise ModuleNotFoundError(f"{name} is now {moved()[name]}")
        package, _, attribute = name.rpartition(".")
        if package in _NOW_PACKAGES and _defines(_NOW_PACKAGES[package], attribute, path):
            raise ModuleNotFoundError(f"{package} is a package now: {attribute} is in {_NOW_PACKAGES[package]}")
        return None


def _defines(module: str, name: str, path: Sequence[str] | None) -> bool:
    """Whether the source of a module defines a name at its top level."""
    spec = PathFinder.find_spec(module, path)
    if spec is None or spec.origin is None:
        return False
    text = Path(spec.origin).read_text(encoding="utf-8")
    return re.search(rf"^(?:class|def) {re.escape(name)}\b|^{re.escape(name)}\b.* = ", text, re.MULTILINE) is not None
