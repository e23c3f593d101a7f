"""FSDP2's units: the embedding, decoder layers (of which those that share parameters are one), norm and head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING

from pipeline.engines.parallel.stages import StageLayers, keep_stage
from pipeline.engines.torch_native.fsdp_units import layer_units, prefetch_explicitly, units_of
from pipeline.models.construction.meta import build_meta
from tests.sweeps.families import tiny_fields

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


def _llama(*, tied: bool, stage: StageLayers | None = None) -> Any:
    model: Any = build_meta(
        CONFIG_MAPPING["llama"](**_HEADS, num_hidden_layers=4, tie_word_embeddings=tied),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    if stage is not None:
        keep_stage(model, stage)
    return model


def test_embedding_and_head_with_its_norm_are_units_of_their_own() -> None:
    model = _llama(tied=False)
    units = units_of(model)
    assert units.embedding is model.get_input_embeddings()
    assert units.end == (model.model.norm, model.lm_head)
    assert len(units.ordered()) == 1 + 4 + 1
    in_units = {id(p) for unit in units.ordered() for module in unit for p in module.parameters()}
    assert in_units == {id(p) for p in model.parameters()}  # the root's unit is empty


def test_an_embedding_and_head_that_share_a_weight_stay_with_the_root() -> None:
    units = units_of(_llama(tied=True))
    assert (units.embedding, units.end) == (None, ())
    assert len(units.layers) == 4


def test_the_stages_of_a_pipeline_have_a_unit_for_their_own_end_even_if_the_weight_is_tied() -> None:
    first, last = (
        units_of(_llama(tied=True, stage=StageLayers(index, 2, layers, 1.0)))
        for index, layers in enumerate([(0, 2), (2, 4)])
    )
    assert first.embedding is not None
    assert (first.end, len(first.layers)) == ((), 2)
    assert (last.embedding, len(last.end), len(last.layers)) == (None, 2, 2)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group of two ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(("kind", "gathered"), [("llama", False), ("gemma", False), ("inkling_text", True)])
def test_an_embedding_is_gathered_for_the_backward_pass_where_more_than_its_weight_is_in_it(
    kind: str, gathered: bool
) -> None:
    fields = {**tiny_fields(kind), "tie_word_embeddings": False}
    fields.pop("model_type")
    model = build_meta(CONFIG_MAPPING[kind](**fields), dtype=torch.float32, attn_implementation="eager")
    units = units_of(model)
    for unit in units.ordered():
        fully_shard(list(unit))
    root = fully_shard(model)
    prefetch_explicitly(root, units)
    embedding: Any = units.embedding
    assert embedding._get_fsdp_state()._fsdp_param_group.unshard_in_backward == gathered
