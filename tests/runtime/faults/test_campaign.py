"""A short fault injection campaign: one fault of each sort, with a fixed seed (`make test-faults` injects 200)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.runtime.faults.campaign.driver import Campaign, violations_of
from tests.runtime.faults.campaign.injections import FAULTS, can_mount
from tests.runtime.faults.campaign.layouts import LAYOUTS

SEED = 4
FAULT_NAMES = (
    "SIGKILL, one rank, in a write",
    "SIGSTOP, one rank",
    "SIGTERM, the launcher",
    "a bit flipped in a checkpoint",
    "disk full for a while",
    "SIGKILL, the launcher",
    "SIGKILL, all ranks",
    "SIGUSR1, the launcher",
)


PATIENT = {"watchdog": {"heartbeat_timeout": 12.0, "hang_timeout": 60.0}}
"""On busy cores a rank may not run for six seconds, the campaign's limit."""


def test_runs_with_faults_at_random_moments_resume_without_a_failed_check(tokens: Path, tmp_path: Path) -> None:
    log: list[str] = []
    campaign = Campaign(
        tmp_path,
        tokens,
        [
            replace(layout, fields={**layout.fields, **PATIENT})
            for layout in LAYOUTS
            if layout.name == "torch FSDP2, dp 2"
        ],
        ["warm"],
        SEED,
        report=lambda outcome: log.append(str(outcome)),
        log=log.append,
    )
    names = [name for name in FAULT_NAMES if can_mount() or not FAULTS[name].needs_small_disk]
    outcomes = campaign.run(names, jobs=2)
    assert sorted(outcome.kind for outcome in outcomes) == sorted(names), log
    assert violations_of(outcomes) == [], log
