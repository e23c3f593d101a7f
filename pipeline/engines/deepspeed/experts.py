"""Expert parallelism under DeepSpeed: tells its engine that ranks hold different experts.

Gradients of experts are reduced, and partitioned by ZeRO, over the ranks that have the same experts (edp). DeepSpeed
divides the sum by the number of data ranks, as for all other parameters. Its engine recognizes experts only by a layer
of its own class; the layer's computation and parameter names do not matter. Verified with deepspeed 0.19.8:
`runtime/engine.py` (`has_moe_layers`, `_reduce_expert_gradients`, `_resolve_zero3_param_placement`),
`runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py` (`autoep_expert`) and `runtime/bf16_optimizer.py`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups
from torch import nn

from pipeline.engines.parallel.mesh import Mesh


def set_expert_groups(mesh: Mesh | None) -> None:
    """Gives DeepSpeed a mesh's groups for experts; they replace the groups of an earlier engine."""
    by_name = {
        "ep": (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_PARALLEL_GROUP_RANKS),
        "edp": (groups._EXPERT_DATA_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP_RANKS),
    }
    own = {} if mesh is None or mesh.size("ep") == 1 else mesh.expert_groups()
    for axis, (by_size, ranks) in by_name.items():
        by_size.clear()
        ranks.clear()
        if axis in own:
            name = f"ep_size_{mesh.size('ep')}"  # type: ignore[union-attr]
            by_size[name], ranks[name] = own[axis], dist.get_process_group_ranks(own[axis])


def mark_expert(parameter: nn.Parameter) -> None:
    """Marks a parameter of this rank's experts, after `set_expert_groups` and before ZeRO-3 partitions it."""
    [(name, same_experts)] = groups._EXPERT_DATA_PARALLEL_GROUP.items()
    marked: Any = parameter
    marked.allreduce, marked.group_name = False, name
    marked.tensor_model_parallel = True  # counted in the norm on every tp rank: each has other experts or parts
    marked.ds_zero_placement_family, marked.ds_zero_partition_group_name = "autoep_expert", name
    marked.ds_zero_partition_process_group = same_experts


class ExpertMarker(AutoEPMoELayer):  # type: ignore[misc]
    """A module that tells DeepSpeed's engine that marked parameters exist. It has no parameters and never runs."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 0

    def set_deepspeed_parallelism(self, *_args: Any, **_options: Any) -> None:
        """Does nothing: `set_expert_groups` has set the groups."""


def split_experts(parameter_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Separates the parameters of experts into their own groups, as ZeRO requires.

    With expert parallelism this doubles the groups on every rank; some may be empty.
    """
    split = [{**g, "params": [p for p in g["params"] if not is_moe_param(p)]} for g in parameter_groups]
    for name in groups._EXPERT_DATA_PARALLEL_GROUP:
        apart = [[p for p in group["params"] if is_moe_param(p)] for group in parameter_groups]
        split += [
            {**group, "params": experts, "moe": True, "name": name}
            for group, experts in zip(parameter_groups, apart, strict=True)
        ]
    return split
