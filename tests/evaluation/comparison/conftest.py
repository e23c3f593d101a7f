"""A trained model, and the same as a GGUF file in 8 bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.gguf.plan import plan_file
from pipeline.models.gguf.write import write
from tests.evaluation.heldout.small import make_model


@pytest.fixture(scope="session")
def model(tokens: Path) -> Path:
    return make_model(tokens.parent / "comparison/model", tokens, steps=20, heads=2)


@pytest.fixture(scope="session")
def gguf(model: Path, request: pytest.FixtureRequest) -> Path:
    request.getfixturevalue("llama_cpp")
    folder = model.parent / "gguf"
    folder.mkdir()
    write(plan_file(ModelFolder.open(model), "Q8_0"), folder)
    return folder
