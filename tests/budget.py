"""CPU seconds that folders of tests may take: `budget.toml`, scaled by how fast this machine is."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("budget.toml")
TIERS = ("not sweep", "not integration and not sweep")
"""The tests of CI and those of `make test`, in the order of the columns of the file."""
ALLOWED = 1.2
"""How much of its budget a session or a folder may take: as many seconds differ between two runs of the same tests."""


@dataclass(frozen=True)
class Budget:
    """Scaled CPU seconds of a tier.

    Attributes:
        seconds: Folder below tests -> CPU seconds; the tests in tests/ itself are ".".
        scale: Time this machine takes for a fixed loop, as a multiple of that of the machine of the file.
    """

    seconds: Mapping[str, float]
    scale: float = 1.0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def is_exceeded(self, taken: Mapping[str, float]) -> bool:
        """Whether all folders together took too long."""
        return sum(taken.values()) > ALLOWED * self.total

    def over(self, taken: Mapping[str, float]) -> list[str]:
        """Folders that took longer than their own budgets and two seconds."""
        return [each for each in taken if taken[each] > ALLOWED * self.seconds.get(each, 0.0) + 2]


def budget_of(config: pytest.Config) -> Budget | None:
    """The budget of a session that runs the whole of a tier; None for any other, and in a worker of xdist."""
    option = config.option
    part = option.keyword or option.deselect or option.ignore or option.collectonly
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not part
    if hasattr(config, "workerinput") or not whole or option.markexpr not in TIERS:
        return None
    table = tomllib.loads(FILE.read_text())
    scale = loop_seconds() / table["loop_seconds"]
    tier = TIERS.index(option.markexpr)
    return Budget({folder: scale * seconds[tier] for folder, seconds in table["cpu_seconds"].items()}, scale)


def loop_seconds() -> float:
    """CPU seconds of a fixed loop of Python and numpy: the least of three rounds of a tenth of a second."""
    import numpy as np  # noqa: PLC0415 - after tests/conftest.py has set the number of its threads

    values = np.random.default_rng(0).random(400_000)
    rounds = []
    for _ in range(3):
        began = time.process_time()
        sum(number * number % 7 for number in range(700_000))
        np.sort(values)
        rounds.append(time.process_time() - began)
    return min(rounds)


if __name__ == "__main__":
    print(f"loop_seconds = {loop_seconds():.3f}")
