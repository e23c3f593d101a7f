"""A trained model whose heads every consumer takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.evaluation.consumers.consumer import VLLM_PYTHON
from tests import warm_python
from tests.evaluation.heldout.small import make_model


@pytest.fixture(scope="session")
def model(tokens: Path) -> Path:
    """Two heads of 32 features."""
    return make_model(tokens.parent / "consumers/model", tokens, heads=2)


@pytest.fixture
def warm_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM, where there is one, starts with its imports done: they take 10 CPU seconds."""
    if VLLM_PYTHON in os.environ:
        monkeypatch.setenv(VLLM_PYTHON, warm_python.python("vllm"))
