"""Kinds of a step's storages: weights, gradients, optimizer states, logits and buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group

from pipeline.engines.optim.small_moments import AdamWSmallMoments
from pipeline.engines.parallel.vocabulary import _InPlaceCrossEntropy
from pipeline.engines.torch_native import single
from pipeline.engines.torch_native.single import TorchSingle
from pipeline.models.construction import buffers
from pipeline.plan.fake_gpu.memory import Memory
from pipeline.plan.fake_gpu.submissions import pin

aten: Any = torch.ops.aten


def modules_of(engine: Any) -> list[nn.Module]:
    """The modules that an engine has as attributes."""
    found: list[nn.Module] = []
    for value in vars(engine).values():
        values = value if isinstance(value, list) else [value]
        found += [each for each in values if isinstance(each, nn.Module)]
    return found


class _Together:
    """Several optimizers, seen as one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        self.state = {key: value for each in optimizers for key, value in each.state.items()}


def optimizer_of(engine: Any) -> torch.optim.Optimizer:
    """The AdamW of an engine, unwrapped from ZeRO's own optimizer."""
    if hasattr(engine, "_optimizer"):
        return engine._optimizer  # type: ignore[no-any-return]
    if isinstance(engine, TorchSingle):
        return _Together([update.optimizer for update in engine._updates])  # type: ignore[return-value]
    outer = engine._engine.optimizer
    return getattr(outer, "optimizer", outer)  # type: ignore[no-any-return]


def name_weights(optimizer: torch.optim.Optimizer, roots: Sequence[nn.Module], memory: Memory) -> int:
    """Names weights and buffers; returns the number of elements of the weights."""
    weights = {id(p): p for root in roots for p in root.parameters()}
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    memory.name([*weights.values(), *masters], "weights")
    memory.name([buffer for root in roots for buffer in root.buffers()], "buffers")
    for weight in weights.values():
        if not isinstance(weight.data, torch.distributed.tensor.DTensor):
            # the engine's own hook may have taken the gradient already
            weight.register_post_accumulate_grad_hook(
                lambda p: memory.name([p.grad] if p.grad is not None else [], "gradients")
            )
    return sum(p.numel() for p in masters)


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors of an optimizer's states."""
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]


@contextlib.contextmanager
def watched(memory: Memory) -> Iterator[None]:
    """Runs attention by fused kernels, names gradients before they are reduced or added up, and follows resizes."""
    group = _fsdp_param_group.FSDPParamGroup
    post_backward, add_gradient = group.post_backward, single._Master.add_gradient

    def named(self: Any, *args: Any) -> Any:
        with torch.no_grad():
            params = [getattr(p, "_unsharded_param", None) for p in self.fsdp_params]
            memory.name([p.grad for p in params if p is not None and p.grad is not None], "gradients")
        return post_backward(self, *args)

    def added(master: Any, weight: Tensor) -> None:
        memory.name([] if weight.grad is None else [weight.grad], "gradients")
        add_gradient(master, weight)

    group.post_backward = named  # type: ignore[method-assign]
    single._Master.add_gradient = added  # type: ignore[assignment, method-assign]
    pin_memory, torch.Tensor.pin_memory = torch.Tensor.pin_memory, pin  # type: ignore[assignment, method-assign]
    same, buffers._same = buffers._same, lambda first, second: True  # noqa: ARG005  fakes have no values to compare
    try:
        with fused_attention(), memory.following_resizes():
            yield
    finally:
        group.post_backward = post_backward  # type: ignore[method-assign]
        single._Master.add_gradient = add_gradient  # type: ignore[method-assign]
        torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
        buffers._same = same


def makers() -> dict[CodeType, str]:
    """Code of a function whose allocations have a known kind -> that kind."""
    param = _fsdp_param.FSDPParam
    functions: dict[Any, str] = {
        _fsdp_collectives.foreach_all_gather: "weights",
        _fsdp_collectives.foreach_all_gather_copy_out: "weights",
        param.init_all_gather_outputs: "weights",
        param.init_unsharded_param: "weights",
        _fsdp_collectives.foreach_reduce: "gradients",
        param.to_accumulated_grad_if_needed: "gradients",
        param.accumulate_unsharded_grad_if_needed: "gradients",
        torch.optim.AdamW.step: "optimizer",
        AdamWSmallMoments.step: "optimizer",
        single._Update.run: "gradients",
        single._Master.add_gradient: "gradients",
        single._Master.values: "weights",
        _InPlaceCrossEntropy.forward: "logits",
        _InPlaceCrossEntropy.backward: "logits",
    }
    return {_code(function): kind for function, kind in functions.items() if function is not None}


def _code(function: Any) -> CodeType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code: CodeType = function.__code__
    return code


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replaces `F.scaled_dot_product_attention`: [B, H, T, d], [B, K, T', d] twice -> [B, H, T, d].

    On fake devices torch decomposes attention into matrix products, because a CPU build finds no fused kernel. This
    function chooses the kernel as CUDA does and calls the kernel's operator, whose shapes torch knows without having
    the kernel.

    Values may have another head size than queries and keys (multi-head latent attention), which flash attention lacks.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None and query.shape[-1] <= 256 and query.shape[-1] == value.shape[-1]:
        flash = aten._scaled_dot_product_flash_attention
        size = query.shape[-1]  # torch pads it to a multiple of 8 for the kernel (attention.cpp, pad_last_dim)
        query, key, value = (F.pad(each, (0, -size % 8)) if size % 8 else each for each in (query, key, value))
        scale = size**-0.5 if scale is None and size % 8 else scale
        out: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :size] if size % 8 else out
    assert not enable_gqa or query.shape[1] == key.shape[1], "no fused kernel: masks and fp32 need repeated heads"
    bias = None
    if attn_mask is not None:
        bias = attn_mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
    efficient = aten._scaled_dot_product_efficient_attention
    attended: Tensor = efficient(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]
    return attended


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Replaces attention by `attend` within the block."""
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
