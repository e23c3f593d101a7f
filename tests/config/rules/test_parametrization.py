"""Rules of `model.parametrization`, and what of it decides a curve."""

from __future__ import annotations

from typing import Any

import pytest

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.rules.curve import curve_fields
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config

COMPLETEP = {"parametrization": "completep", "base": {"hidden_size": 64, "num_hidden_layers": 2}}


def config(model: dict[str, Any], **changes: Any) -> Config:
    raw: dict[str, Any] = {
        "model": {"config": {"model_type": "llama"}, **model},
        "data": {"sources": [{"path": "tokens"}], "sequence_length": 16},
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "run": {"dir": "run", "steps": 2},
    }
    return parse(Config, {**raw, **changes})


@pytest.mark.parametrize(
    ("model", "changes", "field"),
    [
        ({"parametrization": "completep"}, {}, "model.base"),
        ({"parametrization": "completep", "base": {}}, {}, "model.base"),
        ({"base": {"hidden_size": 64}}, {}, "model.base"),
        (COMPLETEP, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, "optimizer.type"),
        ({**COMPLETEP, "config": None, "path": "model", "keep_layers": [0]}, {}, "model.keep_layers"),
    ],
)
def test_what_does_not_go_together_is_refused(model: dict[str, Any], changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(config(model, **changes), world_size=1)
    assert caught.value.field == field


@pytest.mark.parametrize("kind", ["Lion", "Muon"])
def test_optimizers_whose_steps_do_not_grow_with_the_gradient_are_taken(kind: str) -> None:
    optimizer = {"type": kind, "params": {"lr": 1e-4}}
    assert resolve(config(COMPLETEP, optimizer=optimizer), world_size=1).config.model.base is not None


def test_the_base_model_is_part_of_the_curve_and_absent_without() -> None:
    with_base, plain = (curve_fields(resolve(config(each), world_size=1))["model"] for each in (COMPLETEP, {}))
    assert (with_base["parametrization"], with_base["base"]) == ("completep", COMPLETEP["base"])
    assert (plain["parametrization"], plain["base"]) == (None, None)
