"""Muon (Jordan et al. 2024): the momentum of a hidden matrix is orthogonalized; AdamW for all other parameters.

m <- b m + (1 - b) g; with Nesterov momentum u = b m + (1 - b) g, else u = m; then w <- (1 - lr decay) w - lr s O, where
O is u orthogonalized (`newton_schulz`), and s the factor of `adjust_lr`. Defaults are those of DeepSpeed 0.19.8.

A rank updates its part of a parameter; the whole matrix exists on its owner only while it is orthogonalized
(`matrix_exchange`). The iteration and its messages are in bf16 on GPUs, as published, and in fp32 on a CPU.

With QK-Clip (`qk_clip`) the queries and keys of some heads are scaled after the update by Muon or AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.sections.optimizers import OptimizerParams
from pipeline.engines.optim.groups import MATRICES
from pipeline.engines.optim.matrix_exchange import HeldShard, MatrixExchange
from pipeline.engines.optim.newton_schulz import flops, orthogonalize, update_scale
from pipeline.engines.optim.qk_clip import QkClip
from pipeline.models.hidden_matrices import MatrixForm
from pipeline.models.query_key_rows import HeadRows

MOMENTUM, STEP = "momentum_buffer", "step"


def build(groups: list[dict[str, Any]], params: OptimizerParams, *, lr: float, fused: bool) -> Muon:
    """Builds Muon from parameter groups."""
    return Muon(groups, params, lr=lr, fused=fused)


class Muon(torch.optim.AdamW):
    """Muon for groups with a true `matrices`, AdamW for the others.

    Before `bind_matrices` is called, a step changes nothing: DeepSpeed makes such a step to allocate state.

    Args:
        groups: parameter groups.
        params: the config's `optimizer.params`.
        lr: learning rate of all groups.
        fused: whether to use torch's fused AdamW.

    Attributes:
        grad_scale, found_inf: fp32 scalars on the device, or None: divisor of all gradients, and 1 for a step that
            changes nothing.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], params: OptimizerParams, *, lr: float, fused: bool) -> None:
        assert params.momentum is not None
        assert params.betas is not None
        assert params.eps is not None
        assert params.ns_steps is not None
        assert params.adjust_lr is not None
        super().__init__(groups, lr=lr, betas=params.betas, eps=params.eps, weight_decay=0.0, fused=fused or None)
        self._momentum, self._nesterov = params.momentum, bool(params.nesterov)
        self._steps, self._rule = params.ns_steps, params.adjust_lr
        self._index: dict[int, int] = {}
        self._exchange: MatrixExchange | None = None
        self._clip: QkClip | None = None
        self._clipped: dict[int, Sequence[HeldShard[HeadRows]]] = {}

    def bind_matrices(
        self, held: Sequence[tuple[Tensor, Sequence[HeldShard[MatrixForm]]]], group: dist.ProcessGroup | None
    ) -> None:
        """Sets which parts of which matrices are in the groups' tensors. Collective.

        Args:
            held: the tensors that have a gradient, in the same order on all ranks of the group, and this rank's shards
                in each; no shards in tensors of AdamW's groups.
            group: the ranks that together have every matrix; None for one process.
        """
        self._index = {id(tensor): index for index, (tensor, _) in enumerate(held)}
        self._exchange = MatrixExchange([shards for _, shards in held], group, flops=self._flops)

    def bind_whole(self, parameters: Mapping[str, Tensor], matrices: Mapping[str, MatrixForm]) -> None:
        """Calls `bind_matrices` for a process that has all parameters whole.

        Args:
            parameters: the tensors of the groups by parameter name; tensors without a gradient are not changed.
            matrices: forms of the hidden matrices, by parameter name.
        """
        trained = {name: p for name, p in parameters.items() if name in matrices and p.requires_grad}
        held = [
            (p, [HeldShard(name, matrices[name], None, 0, 0, math.prod(matrices[name].shape))])
            for name, p in trained.items()
        ]
        self.bind_matrices(held, None)

    def bind_clip(self, clip: QkClip, held: Sequence[tuple[Tensor, Sequence[HeldShard[HeadRows]]]]) -> None:
        """Sets which rows of queries and keys are in the groups' tensors, for QK-Clip to scale after each step.

        Args:
            clip: the run's QK-Clip, which gets the largest logits before a step.
            held: tensors of the groups, and this rank's shards in each.
        """
        self._clip, self._clipped = clip, {id(tensor): shards for tensor, shards in held}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every parameter. A matrix's missing gradient counts as zeros: all ranks have to take part."""
        assert closure is None
        if self._exchange is None:
            return
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group.get(MATRICES)]
            super().step()
        finally:
            self.param_groups = groups
        updated = [
            (p, group) for group in groups if group.get(MATRICES) for p in group["params"] if id(p) in self._index
        ]
        vetoed = None if self.found_inf is None else self.found_inf.reshape(()) > 0
        if updated:
            self._update(updated, self._exchange, vetoed)
        if self._clip is not None:
            for each in chain.from_iterable(group["params"] for group in groups):
                if shards := self._clipped.get(id(each)):
                    self._clip.scale(each, shards, vetoed=vetoed)

    def _update(
        self, updated: list[tuple[Tensor, dict[str, Any]]], exchange: MatrixExchange, vetoed: Tensor | None
    ) -> None:
        directions = {self._index[id(p)]: self._direction(p, vetoed) for p, _ in updated}
        exchange.apply(directions, self._orthogonalize)
        for parameter, group in updated:
            direction = directions[self._index[id(parameter)]]
            new = (parameter * (1 - group["lr"] * group["weight_decay"])).sub_(direction, alpha=group["lr"])
            parameter.copy_(new if vetoed is None else torch.where(vetoed, parameter, new))

    def _direction(self, parameter: Tensor, vetoed: Tensor | None) -> Tensor:
        """Updates the momentum with the gradient; returns u in the dtype of messages."""
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if STEP not in state:
            state[STEP] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        momentum = state[MOMENTUM].lerp(gradient, 1 - self._momentum)
        direction = gradient.lerp(momentum, self._momentum) if self._nesterov else momentum
        state[MOMENTUM].copy_(momentum if vetoed is None else torch.where(vetoed, state[MOMENTUM], momentum))
        state[STEP] += 1 if vetoed is None else (~vetoed).to(state[STEP].device, torch.float32)
        dtype = torch.bfloat16 if parameter.device.type == "cuda" else torch.float32
        return direction.to(dtype).contiguous()

    def _orthogonalize(self, stored: list[tuple[MatrixForm, Tensor]]) -> None:
        """Replaces whole matrices, in their stored form, by their update at learning rate 1."""
        split = [form.split(matrix) for form, matrix in stored]
        done = iter(orthogonalize([each for parts in split for each in parts], steps=self._steps))
        for (form, matrix), parts in zip(stored, split, strict=True):
            form.write([next(done) * update_scale(*part.shape, rule=self._rule) for part in parts], matrix)

    def _flops(self, form: MatrixForm) -> float:
        return float(sum(flops(*each, steps=self._steps) for each in form.matrices))
