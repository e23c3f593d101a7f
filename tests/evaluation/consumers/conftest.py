"""A dataset, and a trained model whose heads every consumer takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.heldout.small import make_model, make_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="session")
def model(tokens: Path) -> Path:
    """Two heads of 32 features."""
    return make_model(tokens.parent / "model", tokens, heads=2)
