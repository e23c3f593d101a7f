"""Custom training loops on native PyTorch: DDP at ZeRO stage 0, FSDP2 at stages 1 to 3.

Weights, gradients and optimizer states are fp32; with bf16 or fp16 the forward pass runs under autocast. FSDP2 shards
all three. Stages 1 and 2 keep the weights gathered during an optimizer step, stage 3 during a block. With bf16, weights
are gathered in bf16, half the bytes, and gradients reduced in fp32.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pipeline.engines.common import raise_if_non_finite
from pipeline.engines.loss_scale import LossScaler
from pipeline.engines.parallel.conditional_modules import complete_gradients
from pipeline.engines.parallel.mesh import Mesh
from pipeline.own_loop.engine import LoopEngine, Parts
from pipeline.own_loop.state import StateEntry


class TorchLoop(LoopEngine):
    """A `LoopEngine` on engine torch.

    Args:
        parts: model, optimizer, config and batch sizes.
        mesh: process groups; None for one process.
    """

    def __init__(self, parts: Parts, mesh: Mesh | None) -> None:
        super().__init__(parts)
        config = parts.config
        self._clip, self._scale = config.gradient_clipping, LossScaler(config.fp16)
        self._autocast: torch.dtype | None = None
        if config.bf16.enabled or config.fp16.enabled:
            self._autocast = torch.bfloat16 if config.bf16.enabled else torch.float16
        self._wrapped: nn.Module = parts.model
        if mesh is not None:
            complete_gradients(parts.model)
            stage = config.zero_optimization.stage
            self._wrapped = _replicated(parts) if stage == 0 else _sharded(parts, mesh, keep=stage < 3)

    def _root(self) -> nn.Module:
        return self._wrapped

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._sync_at_next_backward(self._backwards + 1 == self._accumulation)
        with torch.autocast(self.device.type, dtype=self._autocast, enabled=self._autocast is not None):
            return self._wrapped(*args, **kwargs)

    def _sync_at_next_backward(self, sync: bool) -> None:
        """Reduces gradients only in the last micro-batch of an optimizer step (gradient accumulation)."""
        if isinstance(self._wrapped, DistributedDataParallel):
            self._wrapped.require_backward_grad_sync = sync
        elif isinstance(self._wrapped, FSDPModule):
            self._wrapped.set_requires_gradient_sync(sync)

    def _backward(self, loss: Tensor) -> None:
        (loss * (self._scale.value / self._accumulation)).backward()

    def _step(self, ends: bool) -> None:
        if not ends:
            return
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        self.grad_norm = _norm(gradients) / self._scale.value
        finite = math.isfinite(self.grad_norm)
        if finite:
            factor = self._scale.factor(self.grad_norm, self._clip)
            if factor != 1.0:
                torch._foreach_mul_([_local(g) for g in gradients], factor)
            self._parts.optimizer.step()
        self._parts.optimizer.zero_grad(set_to_none=True)
        if not self._scale.enabled:
            raise_if_non_finite(self.steps + 1, "gradient norm", self.grad_norm)
        self._scale.update(self.steps + 1, overflow=not finite)

    def _state_entries(self) -> list[StateEntry]:
        state = self._parts.optimizer.state
        return [_entry(name, p, state[p]) for name, p in self.module.named_parameters()]

    def _after_load(self) -> None:
        """Does nothing: the loaded fp32 weights are the model's own."""

    def _loss_scale(self) -> list[float]:
        numbers: list[float] = self._scale.to_tensor().tolist()
        return numbers

    def _set_loss_scale(self, state: list[float]) -> None:
        self._scale.load_tensor(torch.tensor(state, dtype=torch.float64))


def _replicated(parts: Parts) -> nn.Module:
    devices = None if parts.device.type == "cpu" else [parts.device]
    # buffers: BatchNorm's are synchronized already; the model handles others, at every stage
    with warnings.catch_warnings():
        # torch 2.13 renamed the argument; 2.11 does not have the new name
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        return DistributedDataParallel(parts.model, device_ids=devices, broadcast_buffers=False)


def _sharded(parts: Parts, mesh: Mesh, *, keep: bool) -> nn.Module:
    """Applies FSDP2 in place; the optimizer gets the new parameters."""
    names = {id(parameter): name for name, parameter in parts.model.named_parameters()}
    dtypes: dict[str, Any] = {}
    if parts.config.bf16.enabled:
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    # autocast casts the inputs of products; the model's inputs stay unchanged, as at stage 0
    same: dict[str, Any] = {"mesh": mesh.sharding_mesh()}
    same["mp_policy"] = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    for block in _blocks(parts.model):
        fully_shard(block, reshard_after_forward=not keep, **same)
    fully_shard(parts.model, reshard_after_forward=False, **same)
    now = dict(parts.model.named_parameters())
    for group in parts.optimizer.param_groups:
        group["params"] = [now[names[id(old)]] for old in group["params"]]
    return parts.model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules to shard one by one: children of ModuleList and Sequential that have children themselves.

    Only the outermost modules: a nested block would be gathered twice.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    found = [child for each in lists for child in each.children() if any(True for _ in child.children())]
    inner = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inner and not isinstance(block, nn.ModuleList)]


def _norm(gradients: list[Tensor]) -> float:
    if not gradients:
        return 0.0
    square = torch.stack([_local(g).detach().float().square().sum().double() for g in gradients]).sum()
    if isinstance(gradients[0], DTensor):
        dist.all_reduce(square)
    return float(square.sqrt())


def _entry(name: str, parameter: nn.Parameter, state: dict[str, Any]) -> StateEntry:
    local, start = _local(parameter), 0
    if isinstance(parameter.data, DTensor):
        rows = -(-parameter.shape[0] // parameter.data.device_mesh.size())
        first = min(parameter.shape[0], rows * parameter.data.device_mesh.get_local_rank())
        start = first * math.prod(parameter.shape[1:])
    return StateEntry(name, tuple(parameter.shape), start, parameter, 0, local.numel(), state)


def _local(tensor: Tensor) -> Tensor:
    data = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    return data.to_local() if isinstance(data, DTensor) else data
