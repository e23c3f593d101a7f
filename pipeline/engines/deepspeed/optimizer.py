"""Makes the optimizer for DeepSpeed's engine: one with an update gate, for ZeRO to wrap, or `ReplicatedOptimizer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.deepspeed.experts import split_experts
from pipeline.engines.deepspeed.replicated import NormScope, ReplicatedOptimizer
from pipeline.engines.optim.build import build_optimizer
from pipeline.engines.optim.groups import UpdateScale, parameter_groups, without_empty_groups
from pipeline.engines.parallel.assemble import LocalModel

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


def make_optimizer(
    run: ResolvedRun,
    local_model: LocalModel,
    scales: Mapping[str, UpdateScale],
    *,
    model_group: dist.ProcessGroup | None,
    expert_group: dist.ProcessGroup | None,
    counts_unsharded: bool,
    update_allowed: Callable[[], bool],
) -> torch.optim.Optimizer:
    """Makes the optimizer for DeepSpeed's engine: `ReplicatedOptimizer` at stage 0, else one that ZeRO wraps.

    Args:
        run: the resolved config.
        local_model: this rank's part of the model, materialized.
        scales: factors on the optimizer's hyperparameters, by parameter name.
        model_group: the ranks that together have the whole model; None if this rank has it.
        expert_group: the ranks that together have a layer's experts; None if this rank has them.
        counts_unsharded: whether this rank counts, in the norm, gradients of parameters that all tp ranks have.
        update_allowed: function that decides on every update, called when the gradient norm is known.
    """
    section, named = run.config.optimizer, local_model.decoder.parameters_by_name()
    if run.config.zero_optimization.stage > 0:
        hook_partial_gradients(local_model)
        groups = split_experts(parameter_groups(named, scales, section.params))
        groups = without_empty_groups(groups)
        return with_update_gate(build_optimizer(groups, section), update_allowed)
    tp_sharded = local_model.tensor.boxes.keys() if local_model.tensor else set()
    tied_copies = local_model.tied if not local_model.decoder.layout.first else frozenset()
    own = named.keys() if counts_unsharded else tp_sharded
    counted = frozenset(named.keys() & own - tied_copies - local_model.experts.keys())
    scope = NormScope(counted, model_group, expert_group, counts_experts=counts_unsharded)
    clip = run.config.gradient_clipping
    return ReplicatedOptimizer(local_model, scales, section, clip=clip, norm_scope=scope, update_allowed=update_allowed)


def with_update_gate(optimizer: Opt, update_allowed: Callable[[], bool]) -> Opt:
    """Makes `step` of an optimizer do nothing unless the update is allowed.

    ZeRO's optimizers compute the gradient norm, unscale and clip, and then call `step` of the optimizer they wrap, once
    for all flat tensors (`BF16_Optimizer`), per parameter group (stages 1 and 2) or per sub-group (stage 3). Before
    this call they change no state that outlives the step; after it they only copy the fp32 weights into the model's and
    free the gradients. So the whole update can be skipped here, without patching the engine. If the norm is not finite,
    they skip the update themselves and do not call `step`. Verified with deepspeed 0.19.8: `step` in
    `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py` (state on a disk is swapped in and written back unchanged)
    and `runtime/bf16_optimizer.py`.

    The optimizer keeps its class: DeepSpeed recognizes supported optimizers by their exact type.

    Args:
        optimizer: the optimizer, whose `step` is replaced.
        update_allowed: function that returns whether to update, the same in all calls of one step.
    """
    update = optimizer.step

    def step(closure: Any = None) -> None:
        assert closure is None
        if update_allowed():
            update()

    optimizer.step = step  # type: ignore[method-assign, assignment]
    return optimizer


def hook_partial_gradients(local_model: LocalModel) -> None:
    """Registers hooks that sum partial gradients over the tp ranks before DeepSpeed reduces them.

    A hook on a leaf gets the leaf's complete gradient of a backward pass, and runs before DeepSpeed's hooks move
    gradients into buckets. The sum is computed in fp32.
    """
    if local_model.tensor is None:
        return
    named = local_model.decoder.parameters_by_name()
    for name in sorted(local_model.tensor.partial_gradients & named.keys()):
        named[name].register_hook(partial(_all_reduced, local_model.tensor.group))


def _all_reduced(group: dist.ProcessGroup, gradient: Tensor) -> Tensor:
    total = gradient.float() if gradient.dtype != torch.float32 else gradient.clone()
    dist.all_reduce(total, group=group)
    return total.to(gradient.dtype)
