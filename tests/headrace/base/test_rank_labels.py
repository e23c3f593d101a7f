"""Tracebacks of ranks that write the same log."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_FAILING = "from headrace.base.cli import guarded, leave\nleave(guarded(lambda: 1 / 0))"


@pytest.mark.parametrize(
    "variables",
    [{"RANK": "3", "WORLD_SIZE": "4"}, {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}],
)
def test_every_line_of_a_ranks_traceback_names_the_rank(variables: dict[str, str]) -> None:
    done = failing(variables)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == "[rank 3] ZeroDivisionError: division by zero"
    assert all(line.startswith("[rank 3] ") for line in lines)


@pytest.mark.parametrize("variables", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}])  # the second: a batch script
def test_a_single_process_has_pythons_own_traceback(variables: dict[str, str]) -> None:
    done = failing(variables)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")


def failing(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD"))}
    return subprocess.run(
        [sys.executable, "-c", _FAILING], env=kept | variables, capture_output=True, text=True, check=False
    )
