"""Pipeline stages: balanced by cost, and a group for each neighbour of a rank."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig

from foundation.errors import ConfigError
from pipeline.config.rules.stage_devices import StageDevices
from pipeline.config.topology import link_of
from pipeline.engines.parallel.costs import describe_stages, forward_flops
from pipeline.engines.parallel.mesh import Mesh, tied_weights_group
from pipeline.engines.parallel.partition import pipeline_stages
from pipeline.engines.parallel.rank_model import widths_of
from pipeline.engines.parallel.stages import StageLayers, split_layers
from pipeline.engines.sizes.footprint import footprint_of
from pipeline.engines.sizes.memory import peak_memory
from pipeline.engines.torch_native.pipeline import PipelineSchedule, StageModule
from tests.engines.parallel.layouts import T, resolved
from tests.engines.parallel.ranks import WORLD, Ranks
from tests.models.architectures import meta_of
from tests.sweeps.families import tiny_fields


@settings(max_examples=80, deadline=None)
@given(costs=st.lists(st.floats(0.1, 10), min_size=1, max_size=8), head=st.floats(0, 20), stages=st.integers(1, 8))
def test_the_split_is_optimal(costs: list[float], head: float, stages: int) -> None:
    if stages > len(costs):
        with pytest.raises(ConfigError, match=f"use at most {len(costs)}"):
            split_layers(costs, head=head, stages=stages)
        return
    found = split_layers(costs, head=head, stages=stages)
    best = min(
        max(sum(costs[a:b]) + (head if b == len(costs) else 0.0) for a, b in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
    )
    assert max(stage.cost for stage in found) == pytest.approx(best)
    assert [n for stage in found for n in range(*stage.layers)] == list(range(len(costs)))
    assert sum(stage.cost for stage in found) == pytest.approx(sum(costs) + head)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "dualpipev"])
def test_ends_without_layers_where_head_and_embedding_count_as_layers(schedule: str) -> None:
    run = resolved(world_size=2, parallel={"pp": 2, "schedule": schedule})
    for layers, expected in ((3, [1, 1, 1, 0]), (2, [0, 1, 1, 0])):
        model = meta_of("llama", num_hidden_layers=layers)
        if schedule == "dualpipev":  # both ends are on the first rank, which needs a layer
            with pytest.raises(ConfigError, match="2 stages each are 4"):
                pipeline_stages(run, model)
        else:
            assert layers_of(run, model) == expected
    with pytest.raises(ConfigError, match="2 stages each are 4"):
        pipeline_stages(run, meta_of("llama", num_hidden_layers=1))


DEVICES = st.integers(1, 5).flatmap(
    lambda stages: st.tuples(
        st.lists(st.floats(0.1, 10), min_size=stages, max_size=8),
        st.lists(st.floats(0.05, 1), min_size=stages, max_size=stages),
        st.lists(st.integers(0, 6), min_size=stages, max_size=stages),
    )
)


@settings(max_examples=150, deadline=None)
@given(devices=DEVICES, head=st.floats(0, 20))
def test_uneven_devices_are_split_optimally(devices: tuple[list[float], list[float], list[int]], head: float) -> None:
    costs, speeds, most = devices
    stages = len(speeds)
    splits = (
        itertools.pairwise((0, *cuts, len(costs))) for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
    )
    ways = [list(pairs) for pairs in splits]
    fitting = [way for way in ways if all(b - a <= m for (a, b), m in zip(way, most, strict=True))]
    seconds = [
        max(
            (sum(costs[a:b]) + (head if b == len(costs) else 0.0)) / speed
            for (a, b), speed in zip(way, speeds, strict=True)
        )
        for way in fitting
    ]
    found = split_layers(costs, head=head, stages=stages, speeds=speeds, limit=lambda stage, start: start + most[stage])
    assert bool(found) == bool(fitting)
    if found:
        assert max(each.cost / speed for each, speed in zip(found, speeds, strict=True)) == pytest.approx(min(seconds))
        assert [each.layers for each in found] in [list(way) for way in fitting]


def layers_of(run: Any, model: Any) -> list[int]:
    return [end - first for first, end in (stage.layers for stage in pipeline_stages(run, model))]


def test_equal_speeds_divide_the_layers_as_no_speeds_do() -> None:
    model = meta_of("llama", num_hidden_layers=8)
    for parallel in ({"pp": 2}, {"pp": 4}, {"pp": 2, "schedule": "interleaved_1f1b"}):
        plain = resolved(world_size=parallel["pp"], parallel=parallel)
        equal = resolved(world_size=parallel["pp"], parallel={**parallel, "stage_speeds": [0.5] * parallel["pp"]})
        assert pipeline_stages(equal, model) == pipeline_stages(plain, model)


def test_a_rank_at_half_speed_gets_half_as_much_work() -> None:
    model = meta_of("llama", num_hidden_layers=12)
    run = resolved(world_size=2, parallel={"pp": 2, "stage_speeds": [1, 0.5]})
    first, last = (stage.cost for stage in pipeline_stages(run, model))
    layer = forward_flops(model, sequence_length=T)[0][0]
    assert abs(first - 2 * last) <= 2 * layer  # to within a layer on either rank


def test_virtual_stages_have_the_speed_of_their_rank() -> None:
    model = meta_of("llama", num_hidden_layers=12)
    parallel = {"pp": 2, "schedule": "interleaved_1f1b", "stage_speeds": [1, 3]}
    counts = layers_of(resolved(world_size=2, parallel=parallel), model)
    assert sum(counts) == 12
    assert counts[0] + counts[2] < counts[1] + counts[3]


def peaks(run: Any, model: Any) -> list[float]:
    footprint = footprint_of(run, model)
    return [peak_memory(run, footprint, pp_rank=rank).total for rank in range(run.topology.pp)]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_no_rank_gets_layers_that_its_memory_does_not_hold(schedule: str) -> None:
    model = meta_of("llama", num_hidden_layers=12)
    parallel = {"pp": 2, "schedule": schedule}
    free = resolved(world_size=2, parallel=parallel)
    before = peaks(free, model)
    memory = [before[0] * 0.7, before[1] * 1.6]
    limited = resolved(world_size=2, parallel={**parallel, "stage_memory_gb": [each / 1e9 for each in memory]})
    counts = layers_of(limited, model)
    assert sum(counts) == 12
    assert sum(counts[::2]) < sum(layers_of(free, model)[::2])
    assert all(peak <= most for peak, most in zip(peaks(limited, model), memory, strict=True))
    # one more layer would not fit, or would not make the slowest stage faster
    assert schedule != "1f1b" or peaks_with_one_more(free, model, counts)[0] > memory[0]


def peaks_with_one_more(run: Any, model: Any, counts: list[int]) -> list[float]:
    """Peaks with a layer of the last rank on the first, forced by the speeds."""
    for share in range(1, 100):
        moved = replace(run, measured_devices=StageDevices((share / 100, 1 - share / 100)))
        if layers_of(moved, model)[0] == counts[0] + 1:
            return peaks(moved, model)
    raise AssertionError("no speeds give this division")


def test_a_model_that_no_division_fits_is_refused_with_what_each_rank_lacks() -> None:
    model = meta_of("llama", num_hidden_layers=12)
    free = resolved(world_size=2, parallel={"pp": 2})
    before = peaks(free, model)
    limited = resolved(world_size=2, parallel={"pp": 2, "stage_memory_gb": [before[0] * 0.5 / 1e9, before[1] / 1e9]})
    with pytest.raises(
        ConfigError, match=r"hold at most \d+, \d+ \(\d+ in all\) of 12 decoder layers; .* rank 0 with .* lacks .* GB"
    ):
        pipeline_stages(limited, model)


def test_a_large_head_takes_layers_from_the_last_stage() -> None:
    assert [s.layers for s in split_layers([1.0] * 8, head=3.0, stages=2)] == [(0, 5), (5, 8)]


def test_sliding_windows_and_inactive_experts_cost_less() -> None:
    sliding, full, again = forward_flops(meta_of("gemma3_text"), sequence_length=4096)[0]
    assert sliding == again < full
    windowed, plain = (forward_flops(meta_of(name), sequence_length=4096)[0][0] for name in ("mistral", "llama"))
    assert windowed < plain
    all_experts, two = (forward_flops(meta_of("mixtral", num_experts_per_tok=n), sequence_length=T)[0] for n in (4, 2))
    assert two[0] < 0.7 * all_experts[0]


def test_every_stage_is_described_with_its_layers_and_parameters() -> None:
    run, model = resolved(world_size=2, parallel={"pp": 2}), meta_of("llama_tied")
    lines = describe_stages(model, pipeline_stages(run, model))
    assert len(lines) == 2
    assert "layers 0-1" in lines[0]
    assert "embedding" in lines[0]
    assert "head" in lines[1]
    # the tied embedding is in both stages: 96 x 32 parameters more than the model has
    counts = [int(line.split(" parameters")[0].split()[-1].replace(",", "")) for line in lines]
    assert sum(counts) == sum(p.numel() for p in model.parameters()) + 96 * 32


@pytest.mark.parametrize("kind", ["gemma4_text", "dots3_note_text"])
def test_a_model_whose_layers_have_several_sizes_has_no_one_width(kind: str) -> None:
    assert widths_of(AutoConfig.for_model(**tiny_fields(kind))) is None


@pytest.mark.parametrize("pp", range(2, 10))
def test_no_rank_has_two_links_of_one_number(pp: int) -> None:
    links = {frozenset((rank, (rank + 1) % pp)) for rank in range(pp)}
    for rank in range(pp):
        numbers = [link_of(*link, pp=pp) for link in links if rank in link]
        assert len(set(numbers)) == len(numbers)
    assert len({link_of(*link, pp=pp) for link in links}) == (1 if pp == 2 else 2 + pp % 2)


def groups_of_neighbours(rank: int, schedule: str, virtual: int) -> tuple[str, str, bool]:
    """Names of the groups of messages from the rank before and to the next one; whether strided ones are sent so."""
    run = resolved(world_size=WORLD, parallel={"pp": WORLD, "schedule": schedule})
    mesh, count = Mesh(run.topology, device_type="cpu"), WORLD * virtual
    assert (tied_weights_group(run) is None) == (rank in range(1, WORLD - 1))  # these two have one group less
    of_rank = [StageLayers(rank + lap * WORLD, count, (0, 1), 1.0) for lap in range(virtual)]
    one = nn.Linear(1, 1)
    one.message = None  # type: ignore[assignment]
    modules = [StageModule(one, each) for each in of_rank]  # type: ignore[arg-type]
    made = PipelineSchedule(run, modules, mesh, hidden_size=1, device=torch.device("cpu"))._schedule
    stage = made._stage if virtual == 1 else made._stages[0]
    assert (stage.sends is None) == (schedule == "1f1b")  # which starts sends and receives as one operation
    strided = torch.arange(6.0).view(2, 3).T
    following = dist.P2POp(dist.isend, strided, group=stage.group, group_peer=(rank + 1) % WORLD)
    before = dist.P2POp(dist.irecv, torch.empty(6), group=stage.group, group_peer=(rank - 1) % WORLD)
    stage._in_link_groups([before, following])
    works = [each.op(each.tensor, group=each.group, group_src=each.group_peer) for each in (before,)]
    dist.isend(following.tensor, group=following.group, group_dst=following.group_peer).wait()
    works[0].wait()
    same = torch.equal(before.tensor, strided.flatten())
    return before.group.group_name, following.group.group_name, same


def test_each_neighbour_of_a_rank_with_several_stages_has_its_own_group(ranks: Ranks) -> None:
    found = ranks.run(groups_of_neighbours, "interleaved_1f1b", 2)
    for rank, (before, following, same) in enumerate(found):
        assert before != following
        assert following == found[(rank + 1) % WORLD][0]
        assert same
    assert len({each[0] for each in ranks.run(groups_of_neighbours, "1f1b", 1)}) == 1
