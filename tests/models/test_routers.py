"""Routers are told from other layers by their names, in every family of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.models.construction.stored_names import groups_of_model
from pipeline.models.router_names import is_router
from pipeline.models.routers import find_routers, has_experts
from tests.sweeps.families import families, tiny_fields

EXPERTS = 7  # as many as nothing else in a tiny model has
ROUTED = sorted(kind for kind in families() if has_experts(tiny_fields(kind)))


def meta_of(kind: str) -> nn.Module | None:
    fields: dict[str, Any] = tiny_fields(kind) | ({"is_moe": True} if kind == "doge" else {})
    counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    fields |= {key: EXPERTS for key in counts if key in fields} | {"pad_token_id": 0, "eos_token_id": 0}
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    except (
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
        StrictDataclassError,
    ):  # this family's sizes do not fit together
        return None


def test_every_router_of_every_family_is_known_by_its_name() -> None:
    """Those that transformers names, and every matrix with one output for each expert, by both of its names."""
    tried = 0
    for kind in ROUTED:
        model = meta_of(kind)
        if model is None:
            continue
        tried += 1
        routers = {router.name for router in find_routers(model)}
        rows = {f"{name}.weight" for name, each in model.named_modules() if isinstance(each, nn.Embedding)}  # Doge's
        matrices = {name: p for name, p in model.named_parameters() if name.endswith(".weight") and p.ndim == 2}
        matrices = {name: p for name, p in matrices.items() if name not in rows}
        outputs = EXPERTS + getattr(model.config, "zero_expert_num", 0)  # LongCat's experts that hand tokens through
        routers |= {name.rpartition(".")[0] for name, p in matrices.items() if len(p) in (EXPERTS, outputs)}
        named = {name.rpartition(".")[0] for name in matrices if is_router(name.rpartition(".")[0])}
        assert routers <= named, kind
        stored = [group.key for group in groups_of_model(model, [f"{name}.weight" for name in routers])]
        assert all(is_router(name.removesuffix(".weight")) for name in stored), kind
    assert tried > 40


@pytest.mark.parametrize(
    "name", ["mlp.gate_proj", "mlp.gate_up_proj", "layers.0.mlp.experts.3.gate_proj", "attn.output_gate", "gates.0"]
)
def test_gated_layers_are_no_routers(name: str) -> None:
    assert not is_router(name)
