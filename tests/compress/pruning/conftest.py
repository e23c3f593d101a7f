"""One dataset for all pruning tests, and prunings in this process, which gather, cut and write without evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.section import parse
from pipeline.compress.pruning.config import PruneConfig
from pipeline.compress.pruning.cutting import write_folder
from pipeline.compress.pruning.gathering import find_importance
from pipeline.compress.pruning.rules import PruningPlan, prepare
from pipeline.compress.pruning.selection import Kept, select
from pipeline.models.tokenizer_files import copy_tokenizer
from pipeline.runtime.launch.environment import SINGLE_PROCESS
from tests.evaluation.heldout.small import SEQUENCE, make_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("data") / "tokens")


def raw_config(folder: Path, model: Path, tokens: Path, **fields: Any) -> dict[str, Any]:
    """A config whose output is folder/pruned."""
    config = {"model": str(model), "output": str(folder / "pruned"), "multiple_of": 8, **fields}
    config.setdefault("calibration", {"samples": 16})
    config.setdefault("data", {"path": str(tokens), "sequence_length": SEQUENCE, "batch_size": 8})
    return config


def write_config(folder: Path, model: Path, tokens: Path, **fields: Any) -> Path:
    path = folder / "prune.json"
    path.write_text(json.dumps(raw_config(folder, model, tokens, **fields)))
    return path


def plan_of(folder: Path, model: Path, tokens: Path, **fields: Any) -> PruningPlan:
    return prepare(parse(PruneConfig, raw_config(folder, model, tokens, **fields)))


def pruned(folder: Path, model: Path, tokens: Path, **fields: Any) -> tuple[PruningPlan, Kept]:
    plan = plan_of(folder, model, tokens, **fields)
    assert plan.shape is not None
    how, sums = plan.config.importance, find_importance(plan, SINGLE_PROCESS).sums
    kept = select(sums, plan.anatomy, plan.shape, metric=how.metric, depth=how.depth)
    plan.output.mkdir()
    write_folder(plan, plan.shape, kept, sums, plan.output)
    copy_tokenizer(plan.source.path, plan.output)
    return plan, kept


def indices(part: slice, size: int) -> list[int]:
    """The indices that a slice of dead units leaves."""
    return [n for n in range(size) if n not in range(*part.indices(size))]


def as_rows(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.tolist()
    return found
