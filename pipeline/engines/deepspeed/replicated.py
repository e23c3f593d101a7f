"""ZeRO stage 0: an optimizer with fp32 master weights and states replicated on every data rank (data parallelism, DDP).

DeepSpeed's own wrappers for stage 0 accumulate and reduce gradients in bf16 or fp16, refuse fp32 accumulation, omit the
loss scale (fp16) and make a dummy first step (bf16). So DeepSpeed gets this optimizer instead. If neither bf16 nor fp16
is enabled in its config, DeepSpeed's engine does not wrap the optimizer. It reduces the gradients that
`get_grads_for_reduction` returns, and reads `overflow` and `_global_grad_norm` after `step`. Verified with deepspeed
0.19.8 (`runtime/engine.py`: `_do_optimizer_sanity_check`, `buffered_allreduce_fallback`, `_take_model_step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.sections.optimizers import OptimizerSection
from pipeline.engines.common import master_weight
from pipeline.engines.loss_scale import update_factor
from pipeline.engines.optim.build import build_optimizer
from pipeline.engines.optim.groups import UpdateScale, parameter_groups
from pipeline.engines.optim.state import ensure_all_states
from pipeline.engines.parallel.assemble import LocalModel
from pipeline.engines.parallel.tensor import all_reduce_gradients


@dataclass(frozen=True)
class NormScope:
    """This rank's contribution to the global gradient norm.

    Attributes:
        names: parameters, without experts, whose gradients this rank counts; other ranks count the rest.
        group: the ranks that together have the whole model; None if this rank has it.
        expert_group: the ranks that together have a layer's experts; None if this rank has them.
        counts_experts: whether this rank counts the gradients of all its experts.
    """

    names: frozenset[str]
    group: dist.ProcessGroup | None
    expert_group: dist.ProcessGroup | None
    counts_experts: bool


class ReplicatedOptimizer(torch.optim.Optimizer):
    """An optimizer on fp32 master weights; fp32 weights are their own master weights.

    Args:
        local_model: this rank's part of the model, materialized.
        scales: factors on the optimizer's hyperparameters, by parameter name.
        section: the config's `optimizer`.
        clip: largest norm of the gradient; 0 for no clipping.
        norm_scope: parameters that this rank counts in the global gradient norm, and the groups that sum it.
        update_allowed: function that decides on updates when the norm is known; must return False if it is not finite.

    Attributes:
        masters: the fp32 master weights by Hugging Face name.
        updating: the torch optimizer of the master weights.
        scale: loss scale of the current step.
        overflow: whether the last update was skipped.
    """

    def __init__(
        self,
        local_model: LocalModel,
        scales: Mapping[str, UpdateScale],
        section: OptimizerSection,
        *,
        clip: float,
        norm_scope: NormScope,
        update_allowed: Callable[[], bool],
    ) -> None:
        self._local_model, self._clip, self._norm_scope = local_model, clip, norm_scope
        self._update_allowed = update_allowed
        self._weights = local_model.decoder.parameters_by_name()
        self.masters = {name: master_weight(weight) for name, weight in self._weights.items()}
        groups = parameter_groups(self.masters, scales, section.params)
        self.updating = build_optimizer(groups, section)
        ensure_all_states(self.updating, section.kind)
        super().__init__(self.updating.param_groups, self.updating.defaults)
        self.param_groups, self.state = self.updating.param_groups, self.updating.state
        self.scale, self.overflow, self._global_grad_norm = 1.0, False, 0.0
        for name, weight in self._weights.items():
            if self.masters[name] is not weight:
                weight.register_post_accumulate_grad_hook(self._accumulation_hook(self.masters[name]))

    def gradient(self, name: str) -> Tensor:
        """Returns the fp32 gradient accumulated so far; zeros if there is none."""
        master = self.masters[name]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Returns gradients that DeepSpeed averages over the data ranks once per step: (dense, experts' by group)."""
        tensor = self._local_model.tensor
        if tensor is not None:
            partial = sorted(tensor.partial_gradients & self.masters.keys())
            all_reduce_gradients([self.gradient(name) for name in partial], tensor.group)
        experts: dict[str, list[Tensor]] = {}
        for name in self._local_model.experts:
            group: Any = self._weights[name].group_name  # type: ignore[attr-defined]  # see `mark_expert`
            experts.setdefault(group, []).append(self.gradient(name))
        dense = [self.gradient(name) for name in self.masters if name not in self._local_model.experts]
        return dense, experts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Unscales, clips and updates if the update is allowed; otherwise only clears the gradient."""
        assert closure is None
        self._global_grad_norm = norm = self._norm() / self.scale
        self.overflow = not self._update_allowed()
        if not self.overflow:
            factor = update_factor(norm, clip=self._clip, scale=self.scale)
            if factor != 1.0:
                torch._foreach_mul_([self.gradient(name) for name in self.masters], factor)
            self.updating.step()
            self.refresh_weights()
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Copies the fp32 master weights into the model's weights."""
        for name, weight in self._weights.items():
            if self.masters[name] is not weight:
                weight.copy_(self.masters[name])

    def _norm(self) -> float:
        scope, experts = self._norm_scope, self._local_model.experts
        squares = self._squares([name for name in self.masters if name in scope.names])
        if experts:
            of_experts = self._squares(experts)
            if scope.expert_group is not None:
                dist.all_reduce(of_experts, group=scope.expert_group)
            squares += of_experts * scope.counts_experts
        if scope.group is not None:
            dist.all_reduce(squares, group=scope.group)
        # every data rank computes the norm from its own replica: if one is non-finite, all ranks must decide alike
        torch.nan_to_num_(squares, nan=math.inf, posinf=math.inf)
        dist.all_reduce(squares, op=dist.ReduceOp.MAX)
        return float(squares.sqrt())

    def _squares(self, names: Iterable[str]) -> Tensor:
        gradients = [self.gradient(name) for name in names]
        if not gradients:
            return torch.zeros((), device=next(iter(self.masters.values())).device)
        return torch.nn.utils.get_total_norm(gradients).square()

    @staticmethod
    def _accumulation_hook(master: nn.Parameter) -> Any:
        def accumulate(weight: Tensor) -> None:
            assert weight.grad is not None
            gradient = weight.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            weight.grad = None

        return accumulate
