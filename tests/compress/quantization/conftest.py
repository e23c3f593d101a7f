"""One dataset and two models for all compression tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluation.heldout.small import make_model, make_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="session")
def model(tokens: Path) -> Path:
    folder = make_model(tokens.parent / "model", tokens)
    # as chat models have it; transformers takes a temperature without sampling for a mistake, and would not write it
    generation = {"eos_token_id": [0, 7], "pad_token_id": 3, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "configuration_novel.NovelConfig"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": code}))
    return folder


@pytest.fixture(scope="session")
def untied(tokens: Path) -> Path:
    return make_model(tokens.parent / "untied", tokens, tied=False)
