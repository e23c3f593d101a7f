"""The kill campaign in short: one strike of each sort, in random moments of a fixed seed (`make test-faults`: 200)."""

from __future__ import annotations

from pathlib import Path

from tests.faults.campaign.driver import Campaign, broken
from tests.faults.campaign.layouts import LAYOUTS
from tests.faults.campaign.strikes import KINDS, can_mount

SEED = 4
STRIKES = (
    "SIGKILL, one rank, in a write",
    "SIGSTOP, one rank",
    "SIGTERM, the launcher",
    "a bit flipped in a checkpoint",
    "disk full for a while",
    "SIGKILL, the launcher",
    "SIGKILL, all ranks",
    "SIGUSR1, the launcher",
)


def test_runs_that_are_struck_at_random_moments_go_on_as_if_nothing_had_been(tokens: Path, tmp_path: Path) -> None:
    said: list[str] = []
    campaign = Campaign(
        tmp_path,
        tokens,
        [layout for layout in LAYOUTS if layout.name == "torch FSDP2, dp 2"],
        ["warm"],
        SEED,
        report=lambda outcome: said.append(str(outcome)),
        say=said.append,
    )
    names = [name for name in STRIKES if can_mount() or not KINDS[name].needs_small_disk]
    outcomes = campaign.run(names, jobs=2)
    assert sorted(outcome.kind for outcome in outcomes) == sorted(names), said
    assert broken(outcomes) == [], said
