"""Imports of modules that have moved name the new module."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from headrace.base.renamed_modules import MOVED


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_module_names_a_new_one_that_exists(old: str, new: str) -> None:
    command, *words = new.split()
    assert words[:1] == ["ladder"] if command == "headrace" else importlib.util.find_spec(new) is not None
    with pytest.raises(ModuleNotFoundError, match=f"^{old} has moved to {new}$"):
        importlib.import_module(old)


def test_names_that_never_were_fail_as_ever() -> None:
    assert importlib.util.find_spec("pipeline.nothing_of_the_kind") is None
    with pytest.raises(ImportError, match="cannot import name 'nothing_of_the_kind'"):
        exec("from data_prep.job import nothing_of_the_kind")


@pytest.mark.parametrize("old", ["pipeline.elastic", "pipeline.node_checks.bad_nodes"])
def test_a_job_script_that_runs_an_old_module_is_told_the_new_one(old: str) -> None:
    done = subprocess.run([sys.executable, "-m", old], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"has moved to pipeline.cluster.{old.split('.')[1]}" in done.stderr
