"""Messages of a pipeline: each neighbour of a rank is in a group of its own, so that neither waits for the other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.config.topology import link_of
from pipeline.engines.parallel.mesh import Mesh, tied_weights_group
from pipeline.engines.parallel.stages import StageLayers
from pipeline.engines.torch_native.pipeline import PipelineSchedule, StageModule
from tests.engines.parallel.layouts import resolved
from tests.engines.parallel.ranks import WORLD, Ranks


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
    modules = [StageModule(nn.Linear(1, 1), each) for each in of_rank]  # type: ignore[arg-type]
    made = PipelineSchedule(run, modules, mesh, hidden_size=1, device=torch.device("cpu"))._schedule
    stage = made._stage if virtual == 1 else made._stages[0]
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
