"""FSDP2's units: decoder layers, of which those that share parameters are one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from pipeline.engines.torch_native.sharding import layer_units
from pipeline.models.meta import build_meta

_HEADS = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 64}
_BLOCKS = ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"]


@pytest.mark.parametrize(
    ("kind", "fields", "sizes"),
    [
        ("llama", {"num_hidden_layers": 3}, [1, 1, 1]),
        ("zamba", {"num_hidden_layers": 5, "layers_block_type": _BLOCKS}, [1, 1, 3]),  # its hybrid layers share a block
    ],
)
def test_layers_that_share_parameters_are_one_unit(kind: str, fields: dict[str, Any], sizes: list[int]) -> None:
    config = CONFIG_MAPPING[kind](**_HEADS, **fields)
    model = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    units = layer_units(model)
    assert [len(unit) for unit in units] == sizes
    owned = [{id(p) for layer in unit for p in layer.parameters()} for unit in units]
    assert sum(len(each) for each in owned) == len(set().union(*owned))  # no parameter is in two units
