"""Parts of the native engine: FSDP2's units, and receive buffers of pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING

from foundation.errors import ConfigError
from pipeline.engines.parallel.stages import StageLayers, keep_stage
from pipeline.engines.torch_native.fsdp_units import layer_units, prefetch_explicitly, units_of
from pipeline.engines.torch_native.pipeline import PipelineSchedule
from pipeline.models.construction.meta import build_meta
from tests import warm
from tests.support import output_of
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


CODE = """
import sys
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from pipeline.engines.torch_native.receive_buffers import StageWithFewBuffers
from pipeline.runtime.launch import detect
from pipeline.runtime.launch.group import process_group

launch, name, micro_batches, sizes = detect(), sys.argv[1], 8, []
virtual = 2 if 'Interleaved' in name else 1

def buffers(stages):
    infos = [each for stage in stages for of in (stage.args_recv_info, stage.grad_recv_info) for each in of.values()]
    return [info.buffer for each in infos for info in each if info.buffer is not None and not info.buffer.is_meta]

def gradients(kind):
    modules = []
    for number in range(virtual):
        torch.manual_seed(number * 2 + launch.rank)
        modules.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    sample, stages = torch.empty(2, 4, device='meta', requires_grad=True), []
    for number, module in enumerate(modules):
        index = 2 * number + launch.rank
        first = sample.detach() if index == 0 else sample
        args = (module, index, 2 * virtual, torch.device('cpu'))
        stages.append(kind(*args, input_args=first, output_args=sample))
    def counted(receive):
        def count(index):
            operations = receive(index)
            sizes.append(len(buffers(stages)))
            return operations
        return count
    for stage in stages:
        stage.get_fwd_recv_ops, stage.get_bwd_recv_ops = map(counted, (stage.get_fwd_recv_ops, stage.get_bwd_recv_ops))
    given = stages[0] if virtual == 1 else stages
    schedule = getattr(schedules, name)(given, micro_batches, loss_fn=lambda out, target: (out - target).square().sum())
    for step in range(2):
        inputs = torch.arange(64.0).view(16, 4) / 64 + step
        schedule.step(*([inputs] if launch.rank == 0 else []), target=torch.zeros(16, 4))
    return [p.grad for module in modules for p in module.parameters()], len(buffers(stages))

with process_group(launch, gpu=None, timeout_s=60.0):
    expected, held = gradients(PipelineStage)
    assert held == micro_batches * (2 * virtual - 1), held  # one border less than stages have: the first or the last
    sizes.clear()
    found, left = gradients(StageWithFewBuffers)
    assert left == 0, left
    assert 0 < max(sizes) <= 4, sizes
    assert all(map(torch.equal, found, expected))
    print('most', max(sizes))
"""


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B"])
def test_buffers_are_those_of_messages_in_flight_and_gradients_are_those_of_torchs_stages(schedule: str) -> None:
    assert "most" in output_of(warm.run("-c", CODE, schedule, processes=2, merged=True))


def test_an_error_of_a_schedule_keeps_its_cause_and_our_own_is_unwrapped() -> None:
    schedule = PipelineSchedule.__new__(PipelineSchedule)
    module = SimpleNamespace(begin=lambda *_args, **_scale: None, stage=SimpleNamespace(first=False))
    schedule._prepare, schedule._stage_modules = lambda _count: None, [module]
    schedule._micro_batches, schedule._device = 1, torch.device("cpu")
    ours = ConfigError("key", 1, why="why", remedy="another")
    for cause, expected in ((ValueError("the cause"), RuntimeError), (ours, ConfigError)):

        def step(*_ids: Any, cause: Exception = cause, **_target: Any) -> None:
            raise RuntimeError("Failed to run stage backward") from cause

        schedule._schedule = SimpleNamespace(step=step)
        with pytest.raises(expected) as raised:
            schedule.train([], None, scale=1.0)
        assert raised.value is ours or raised.value.__cause__ is cause
