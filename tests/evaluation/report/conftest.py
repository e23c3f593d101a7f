"""A model, its dataset, and runs that are written down without being trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.heldout.small import make_model, make_tokens
from tests.evaluation.report.made import make_run


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="session")
def model(tokens: Path) -> Path:
    return make_model(tokens.parent / "model", tokens, steps=10)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=40)
