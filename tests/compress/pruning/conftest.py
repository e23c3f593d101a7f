"""One dataset for all pruning tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.heldout.small import make_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("data") / "tokens")
