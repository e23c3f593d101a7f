"""One dataset and one model for all evaluation tests; some folders have a model of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.heldout.small import every_third, make_masked, make_model, make_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="session")
def masked(tokens: Path) -> Path:
    return make_masked(tokens.parent / "masked", tokens, every_third)


@pytest.fixture(scope="session")
def model(tokens: Path) -> Path:
    return make_model(tokens.parent / "model", tokens)
