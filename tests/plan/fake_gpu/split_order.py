"""Prints as JSON the splits that every rank of layouts makes, in order, where NCCL would split its communicators.

python -m tests.plan.fake_gpu.split_order '{"pp": 2, "dp": 2, "cp": 2}' ...
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

import pipeline.plan.fake_gpu.device as fake  # isort: skip  before torch
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.config.topology import Topology
from pipeline.engines.parallel.mesh import Mesh


def splits_of(topology: Topology, rank: int) -> list[list[list[int]]]:
    """The groups of every split that a rank makes."""
    made: list[list[list[int]]] = []

    def split(parent: Any = None, split_ranks: Any = None, **_options: Any) -> Any:
        del parent
        made.append([[int(each) for each in ranks] for ranks in split_ranks])
        own = next((ranks for ranks in made[-1] if rank in ranks), None)
        return None if own is None else dist.new_group(own, use_local_synchronization=True)

    device = torch.device("cuda", 0)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=topology.world_size, device_id=device)
    try:
        with patch.object(dist, "split_group", split), patch.object(device_mesh, "split_group", split, create=True):
            mesh = Mesh(topology, device_type="cuda")
            mesh.stage_group()
            if topology.pp > 1:
                mesh.link_groups()
        return made
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    assert fake.PROPERTIES
    for text in sys.argv[1:]:
        wanted = Topology(**json.loads(text))
        print(json.dumps({rank: splits_of(wanted, rank) for rank in range(wanted.world_size)}))
