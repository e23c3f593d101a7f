"""A dataset and a trained model for the tests of tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.heldout.small import make_model, make_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="session")
def model(tokens: Path) -> Path:
    return make_model(tokens.parent / "model", tokens)
