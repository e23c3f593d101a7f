"""Parts of the native engine: FSDP2's units, and receive buffers of pipeline stages."""

from __future__ import annotations

import weakref
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
from pipeline.engines.parallel.architecture_trial import RandomValues
from pipeline.engines.parallel.assemble import assemble
from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.parallel.stages import StageLayers, keep_stage
from pipeline.engines.sizes.communicators import communicators
from pipeline.engines.torch_native.fsdp_units import layer_units, prefetch_explicitly, units_of
from pipeline.engines.torch_native.pipeline import PipelineSchedule
from pipeline.engines.torch_native.receive_buffers import SendsInFlight
from pipeline.engines.torch_native.sharding import Sharding, shard_decoder
from pipeline.models.construction.meta import build_meta
from tests import warm
from tests.engines.parallel.layouts import resolved
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
def eight_ranks() -> Iterator[None]:
    """A process group of eight ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def _groups() -> list[int]:
    """Sizes of this rank's process groups, in the order in which they were made."""
    return [dist.get_world_size(group) for group in dist.distributed_c10d._world.pg_map]


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ({"zero_optimization": {"stage": 3}}, []),  # the default group is that of the data ranks
        ({"parallel": {"pp": 2}, "zero_optimization": {"stage": 1}}, [2, 4]),
        ({"parallel": {"hybrid_shard_size": 4}, "zero_optimization": {"stage": 3}}, [2, 4]),
        ({"parallel": {"tp": 2, "cp": 2}, "zero_optimization": {"stage": 3}}, [4, 2, 2]),
        ({"parallel": {"ep": 4, "pp": 2}, "zero_optimization": {"stage": 3}}, [2, 4, 2, 1, 4]),  # FSDP2 needs the 1
        ({"parallel": {"ep": 2}, "zero_optimization": {"stage": 3}}, [4, 2]),
        ({"parallel": {"pp": 8, "schedule": "interleaved_1f1b"}, "zero_optimization": {"stage": 1}}, [1, 8]),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, [4, 2]),
    ],
)
def test_a_mesh_makes_no_group_of_one_rank_and_the_planner_counts_groups(
    layout: dict[str, Any], sizes: list[int]
) -> None:
    run = resolved(world_size=8, gradient_accumulation_steps=8, **layout)
    mesh = Mesh(run.topology, device_type="cpu", shard_size=run.shard_size, node=run.node_size)
    if run.virtual_stages > 1:
        mesh.link_groups()
    assert _groups() == [8, *sizes]
    assert communicators(run) == len(sizes)
    assert mesh.data_mesh().size() == mesh.size("data")


@pytest.mark.usefixtures("eight_ranks")
def test_pipeline_stages_with_different_numbers_of_layers_make_as_many_groups_for_hpz() -> None:
    run = resolved(
        world_size=8, parallel={"pp": 2}, zero_optimization={"stage": 3, "zero_hpz_partition_size": 2}, fp8={}
    )
    mesh, model, made = Mesh(run.topology, device_type="cpu", node=2), _llama(tied=False), list[list[int]]()
    sharding = Sharding(3, torch.float32, run.config.fp8, torch.float32)
    for layers in ((0, 1), (1, 4)):
        before = len(_groups())
        local = assemble(run, model, mesh, stage=StageLayers(0, 2, layers, 1.0))
        shard_decoder(
            local, RandomValues(model), mesh, root=local.decoder, sharding=sharding, device=torch.device("cpu")
        )
        made.append(_groups()[before:])
        for [layer] in layer_units(local.decoder.causal):
            [group] = layer._get_fsdp_state()._fsdp_param_groups
            assert group.post_forward_mesh_info.shard_mesh_size == 2
            rows = [each.sharded_post_forward_size[0] / each.sharded_size[0] for each in group.fsdp_params]
            assert set(rows) == {2.0}  # half of a weight, where a quarter is sharded
    assert made == [[], []]


@pytest.mark.usefixtures("eight_ranks")
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


def test_a_sent_tensor_is_freed_once_its_send_has_ended_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, ended = list[weakref.ref[torch.Tensor]](), set[int]()

    def isend(tensor: torch.Tensor, **_to: Any) -> Any:
        """Returns a work that has the tensor, as NCCL's does, whether or not it is waited for."""
        number = len(sent)
        sent.append(weakref.ref(tensor))
        return SimpleNamespace(is_completed=lambda: number in ended, wait=lambda: True, outputs=tensor)

    monkeypatch.setattr(dist, "isend", isend)
    sends = SendsInFlight()
    for _ in range(3):
        sends.start([SimpleNamespace(tensor=torch.zeros(4), group=None, group_peer=1)])  # type: ignore[list-item]
    assert [each() is not None for each in sent] == [True] * 3  # none has ended
    ended.add(1)
    sends.start([])
    assert [each() is not None for each in sent] == [True, False, True]
    sends.wait()
    assert [each() is not None for each in sent] == [False] * 3


CODE = """
import sys
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from pipeline.engines.torch_native.receive_buffers import SendsInFlight, StageWithFewBuffers
from pipeline.runtime.launch import detect
from pipeline.runtime.launch.group import process_group

launch, name, micro_batches, sizes = detect(), sys.argv[1], 8, []
virtual = 2 if 'Interleaved' in name else 1

def buffers(stages):
    infos = [each for stage in stages for of in (stage.args_recv_info, stage.grad_recv_info) for each in of.values()]
    return [info.buffer for each in infos for info in each if info.buffer is not None and not info.buffer.is_meta]

sends = None if '1F1B' == name[-4:] and virtual == 1 else SendsInFlight()

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
        stages[-1].sends = sends
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
        if sends is not None and kind is not PipelineStage:
            assert len(sends._works) == micro_batches * (2 * virtual - 1), len(sends._works)  # gloo: none has ended
            sends.wait()
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
    module: Any = SimpleNamespace(begin=lambda *_args, **_scale: None, stage=SimpleNamespace(first=False))
    schedule._prepare, schedule._stage_modules = lambda _count: None, [module]
    schedule._micro_batches, schedule._device, schedule._carries = 1, torch.device("cpu"), False
    ours = ConfigError("key", 1, why="why", remedy="another")
    for cause, expected in ((ValueError("the cause"), RuntimeError), (ours, ConfigError)):

        def step(*_ids: Any, cause: Exception = cause, **_target: Any) -> None:
            raise RuntimeError("Failed to run stage backward") from cause

        schedule._schedule = SimpleNamespace(step=step)
        with pytest.raises(expected) as raised:
            schedule.train([], None, scale=1.0)
        assert raised.value is ours or raised.value.__cause__ is cause
