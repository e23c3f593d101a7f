"""Imports of modules that have moved say the new name."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from headrace.base.moved import moved


def test_every_old_name_says_a_module_that_exists() -> None:
    assert len(moved()) > 100
    for old, new in moved().items():
        assert importlib.util.find_spec(new) is not None, new
        with pytest.raises(ModuleNotFoundError, match=f"^{old.rpartition('.')[0]}.* is now "):
            importlib.import_module(old)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("from pipeline import session", "pipeline.session is now pipeline.run.session"),
        ("import data_prep.tokenfile", "data_prep.tokenfile is now data_prep.formats.tokenfile"),
        ("from data_prep.job import Job", "Job is in data_prep.job.directory"),
        ("from data_prep.config import CorpusConfig", "CorpusConfig is in data_prep.config.corpus"),
        ("import headrace.errors", "headrace.errors is now headrace.base.errors"),
    ],
)
def test_an_import_of_an_old_name_says_the_new_one(statement: str, words: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=words):
        exec(statement)


def test_other_names_fail_as_ever() -> None:
    assert importlib.util.find_spec("pipeline.nothing_of_the_kind") is None
    with pytest.raises(ImportError, match="cannot import name 'nothing_of_the_kind'"):
        exec("from data_prep.job import nothing_of_the_kind")


def test_an_old_module_that_is_run_says_the_new_one() -> None:
    command = [sys.executable, "-m", "pipeline.proof.shown"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pipeline.proof.shown is now pipeline.proof.table" in done.stderr
