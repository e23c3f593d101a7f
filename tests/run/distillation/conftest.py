"""A teacher that all tests of distillation share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import warm
from tests.conftest import launch, tiny_config, write_config


@pytest.fixture(scope="session")
def teacher(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained llama of three layers, a folder with the tokens' tokenizer."""
    work = tmp_path_factory.mktemp("teacher")
    config = tiny_config(tokens, work / "run", engine="torch")
    config["model"]["config"]["num_hidden_layers"] = 3
    launch("train.py", write_config(work / "c.json", config))
    assert warm.run("-m", "pipeline", "export", work / "run", work / "model").returncode == 0
    return work / "model"
