"""Chooses the layout that a search proposes, and writes the config that trains in it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.base.configfile import overridden, set_value
from headrace.base.shipped import find_shipped
from pipeline.plan.search.search import Candidate
from pipeline.plan.search.verify import Verified

_AS_FAST = 1.01
"""Ratio of times up to which two layouts count as equally fast: the intervals of their times are wider by far."""


def winner_of(verified: Sequence[Verified], *, memory: float) -> Verified | None:
    """The layout with the fewest changed settings among those that fit and are within 1 % of the fastest.

    Layouts in another precision than the config's are no candidates: their loss curve is another one. Of several with
    equally few changes, that with the smallest peak is taken.
    """
    fitting = [each for each in verified if each.fits(memory) and "fp8.enabled" not in each.candidate.sets]
    if not fitting:
        return None
    fastest = min(each.candidate.step_s for each in fitting)
    equal = [each for each in fitting if each.candidate.step_s <= _AS_FAST * fastest]
    return min(equal, key=lambda each: (_changes(each.candidate), each.candidate.peak))


def write_config(candidate: Candidate, path: Path, *, config: str, overrides: Sequence[str]) -> None:
    """Writes a config that extends the one of the search.

    Args:
        candidate: the layout.
        path: path of the new file.
        config: path of the config of the search.
        overrides: overrides that the search was given, as texts of `--set`.
    """
    source = Path(config) if Path(config).exists() else find_shipped(Path(config)) or Path(config)
    raw: dict[str, Any] = overridden({}, overrides)
    for key, value in candidate.sets.items():
        set_value(raw, key, list(value) if isinstance(value, tuple) else value)
    raw = {"extends": os.path.relpath(source.resolve(), path.parent.resolve()), **raw}
    path.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def _changes(candidate: Candidate) -> int:
    return sum(value is not None for value in candidate.sets.values())
