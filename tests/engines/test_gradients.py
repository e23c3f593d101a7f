"""Gradients of weights of which a rank has copies in two stages."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.torch_native.gradients import finish_reduction
from pipeline.engines.torch_native.sharding import ParameterShard


class _OneRank:
    """The mesh of one rank."""

    def group(self, _axis: str) -> None:
        return None


def _shard(gradient: float | None) -> ParameterShard:
    sharded: Any = nn.Parameter(torch.zeros(2))
    sharded.grad = None if gradient is None else torch.full((2,), gradient)
    master = nn.Parameter(sharded.detach())
    plain: Any = _Plain(sharded, master)
    return cast(ParameterShard, plain)


class _Plain:
    """A shard without FSDP2, whose master weight has the weight's own gradient."""

    def __init__(self, sharded: nn.Parameter, master: nn.Parameter) -> None:
        self.sharded, self.master, self.tied, self.partial_gradient = sharded, master, False, False

    def attach(self) -> None:
        self.master.grad = self.sharded.grad


@pytest.mark.parametrize(("own", "copied", "expected"), [(1.0, 2.0, 3.0), (None, 2.0, 2.0), (1.0, None, 1.0)])
def test_the_gradient_of_a_copy_counts_also_where_the_weight_itself_has_none(
    own: float | None, copied: float | None, expected: float
) -> None:
    shard, copy = _shard(own), _shard(copied)
    finish_reduction([shard], cast(Mesh, _OneRank()), None, copies=[(shard, copy)])
    assert shard.master.grad is not None
    assert shard.master.grad.tolist() == [expected] * 2
