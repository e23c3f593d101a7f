"""ZeRO stage 0: every data rank keeps whole fp32 weights and moments, as DistributedDataParallel does.

DeepSpeed's own wrappers for stage 0 accumulate and reduce gradients in bf16 or fp16, refuse fp32 accumulation, leave
out the loss scale (fp16) and make a dummy first step (bf16). So DeepSpeed is given this optimizer instead. Its engine
takes an optimizer as it is when neither bf16 nor fp16 is enabled in its config, reduces the gradients that
`get_grads_for_reduction` returns, and reads `overflow` and `_global_grad_norm` after `step`.
Seen with deepspeed 0.19.8 (`runtime/engine.py`: `_do_optimizer_sanity_check`, `buffered_allreduce_fallback`,
`_take_model_step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.deepspeed_schema import OptimizerParams
from pipeline.engines.common import decay_groups, master_of
from pipeline.engines.loss_scale import update_factor
from pipeline.parallel.assemble import Assembled
from pipeline.parallel.tensor import sum_gradients


@dataclass(frozen=True)
class Counted:
    """What belongs to the norm of the whole gradient.

    Attributes:
        names: parameters whose gradients this rank counts; others count the rest.
        group: the ranks that together hold the whole model; None when this one does.
    """

    names: frozenset[str]
    group: dist.ProcessGroup | None


class Replicated(torch.optim.AdamW):
    """AdamW on fp32 copies of a model's weights; fp32 weights are their own copy.

    Args:
        assembled: this rank's part of the model, real.
        decayed: names that weight decay applies to.
        params: AdamW's numbers.
        clip: largest norm of the gradient; 0 is off.
        counted: see `Counted`.
        permits: asked before an update, when the norm is known, whether to make it; never when it is not finite.

    Attributes:
        masters: the fp32 weights by Hugging Face name.
        scale: what the loss of the step under way was multiplied by.
        overflow: the last step was left out.
    """

    def __init__(
        self,
        assembled: Assembled,
        decayed: set[str],
        params: OptimizerParams,
        *,
        clip: float,
        counted: Counted,
        permits: Callable[[], bool],
    ) -> None:
        self._assembled, self._clip, self._counted, self._permits = assembled, clip, counted, permits
        self._weights = assembled.decoder.named()
        self.masters = {name: master_of(weight) for name, weight in self._weights.items()}
        groups = [g for g in decay_groups(self.masters, decayed, weight_decay=params.weight_decay) if g["params"]]
        super().__init__(groups, lr=0.0, betas=params.betas, eps=params.eps, fused=True)
        self.scale, self.overflow, self._global_grad_norm = 1.0, False, 0.0
        for name, weight in self._weights.items():
            if self.masters[name] is not weight:
                weight.register_post_accumulate_grad_hook(self._adder(self.masters[name]))

    def gradient(self, name: str) -> Tensor:
        """The fp32 gradient that has been added up so far, zeros where there is none."""
        master = self.masters[name]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """What DeepSpeed averages over the data ranks, once per step: (gradients, those of experts by group)."""
        tensor = self._assembled.tensor
        if tensor is not None:
            sum_gradients([self.gradient(name) for name in sorted(tensor.summed & self.masters.keys())], tensor.group)
        return [self.gradient(name) for name in self.masters], {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Unscales, clips and updates, where that is permitted; else leaves all but the gradient as it was."""
        assert closure is None
        self._global_grad_norm = norm = self._norm() / self.scale
        self.overflow = not self._permits()
        if not self.overflow:
            factor = update_factor(norm, clip=self._clip, scale=self.scale)
            if factor != 1.0:
                torch._foreach_mul_([self.gradient(name) for name in self.masters], factor)
            super().step()
            self.refresh_weights()
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Copies the fp32 weights into the model's."""
        for name, weight in self._weights.items():
            if self.masters[name] is not weight:
                weight.copy_(self.masters[name])

    def _norm(self) -> float:
        gradients = [self.gradient(name) for name in self.masters if name in self._counted.names]
        squares = torch.zeros((), device=next(iter(self.masters.values())).device)
        if gradients:
            squares += torch.nn.utils.get_total_norm(gradients).square()
        if self._counted.group is not None:
            dist.all_reduce(squares, group=self._counted.group)
        # every data rank has taken it of its own copy: where one has gone wrong, all are to decide alike
        torch.nan_to_num_(squares, nan=math.inf, posinf=math.inf)
        dist.all_reduce(squares, op=dist.ReduceOp.MAX)
        return float(squares.sqrt())

    @staticmethod
    def _adder(master: nn.Parameter) -> Any:
        def add(weight: Tensor) -> None:
            assert weight.grad is not None
            gradient = weight.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            weight.grad = None

        return add
