"""The checks of `headrace doctor` in their order: cheap ones whose failure makes all others pointless come first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from foundation.errors import ConfigError
from foundation.section import suggest
from headrace.doctor.check import Check

GPUS = "gpus"
"""Name of the check that counts the GPUs of a node, in its figure of the same name."""


def read_checks() -> list[Check]:
    """Reads the table."""
    rows = json.loads(Path(__file__).with_name("table.json").read_text())
    return [Check(**{**row, "module": f"headrace.doctor.checks.{row['module']}"}) for row in rows]


def selected(checks: Sequence[Check], names: Iterable[str]) -> list[Check]:
    """Returns the named checks in the table's order, all without names.

    Raises:
        ConfigError: there is no check of a name.
    """
    names, known = list(names), [check.name for check in checks]
    for name in names:
        if name not in known:
            remedy = f"did you mean '{near}'?" if (near := suggest(name, known)) else "headrace doctor --list"
            raise ConfigError("--only", name, why="there is no check of this name", remedy=remedy)
    return [check for check in checks if not names or check.name in names]
