"""The head fused with the loss: the gradient of the logits is computed in the forward pass, chunk by chunk.

For every chunk of rows it computes logits = hidden @ weight^T, the loss in fp32, and at once the gradients of the
chunk's hidden states and of the weight. So the logits of all rows never exist, and nothing is recomputed: 3 matrix
products of R x D x V in all. Between the passes the gradients are stored: [R, D], and [V, D] in fp32 (with one chunk,
in the weight's dtype). The backward pass multiplies them by the gradient of the total. Source of the idea: Hsu et al.
2024, Liger Kernel (arXiv:2410.10989), section 3.2; Wijmans et al. 2024, Cut Cross-Entropy (arXiv:2411.09009) compares
others.

The head stays a module that is called, so that the hooks with which FSDP2 and ZeRO-3 gather its weight run; once per
micro-batch, for any number of chunks.

Shapes: B samples, T positions, R = B x T rows, D features, V columns of this rank's shard of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import mm_flop, register_flop_formula

from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard

FP16_SCALE = 64.0
"""Factor on fp16 gradients computed before the loss scale is known: probabilities below 6e-8 would round to 0."""


class LossSums(Protocol):
    """Sums that an objective returns; see `engines.objective.Loss`."""

    @property
    def total(self) -> Tensor:
        """Scalar to differentiate, fp32."""
        ...

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Scalars to report, detached."""
        ...


class LossFunction(Protocol):
    """The part of an objective that decoder and head use; see `engines.objective.Objective`."""

    def extra_targets(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Targets per position besides the labels."""
        ...

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Any:
        """Computes the loss."""
        ...

    def with_gradient(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> tuple[Any, Tensor]:
        """Computes the loss and the gradient of its total with respect to the logits."""
        ...


def total_and_parts(loss: LossSums) -> tuple[Tensor, ...]:
    """Returns (total, *parts)."""
    return (loss.total, *loss.parts)


@dataclass(frozen=True)
class LossTask:
    """The loss for a head to compute.

    Attributes:
        objective: the loss.
        labels: int64 [B, T].
        extra_targets: the objective's targets besides the labels, each [B, T, ...].
        vocabulary: this rank's shard of the vocabulary.
        rows: number of rows whose logits exist at a time.
    """

    objective: LossFunction
    labels: Tensor
    extra_targets: tuple[Tensor, ...]
    vocabulary: VocabularyShard
    rows: int


class FusedHead(nn.Linear):
    """A head, made from a linear layer in place, that returns logits, or with a `LossTask` the loss."""

    compiled: Callable[..., Any] | None = None
    """The compiled `loss_and_gradient`; see `parallel.compilation`."""

    def forward(self, hidden: Tensor, *, task: LossTask | None = None) -> Any:
        """Maps hidden states [B, T, D] to logits [B, T, V], or with a task to (total, *parts): sums over targets."""
        if task is None:
            return super().forward(hidden)
        with_gradient = torch.is_grad_enabled() and any(
            each is not None and each.requires_grad for each in (hidden, self.weight, self.bias)
        )
        if not with_gradient:
            return _loss(hidden, self.weight, self.bias, task)
        eager = self.compiled is None or getattr(task.objective, "eager", False)
        compute = loss_and_gradient if eager else self.compiled
        return _FusedLoss.apply(hidden, self.weight, self.bias, task, compute)


def fuse_head(head: nn.Module) -> None:
    """Turns a linear layer into a `FusedHead`, in place: its parameters, names and hooks stay.

    Raises:
        ValueError: the head is not a linear layer.
    """
    if not isinstance(head, FusedHead):
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise ValueError(f"its head is a {type(head).__name__}, and only a linear layer is fused with the loss")
        head.__class__ = FusedHead


def loss_and_gradient(
    objective: LossFunction,
    logits: Tensor,
    labels: Tensor,
    extra_targets: tuple[Tensor, ...],
    vocabulary: VocabularyShard,
    scale: float,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns (total, *parts), and `scale` times the gradient of the total in the dtype of the logits."""
    loss, gradient = objective.with_gradient(logits, labels, *extra_targets, vocabulary=vocabulary)
    if scale != 1.0:
        gradient.mul_(scale)
    return total_and_parts(loss), gradient.to(logits.dtype)


class _FusedLoss(torch.autograd.Function):
    """A loss whose gradients are computed in the forward pass; a backward pass only scales them, and can be repeated.

    A zero-bubble schedule runs the backward pass twice, for the gradients of the hidden states and of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: LossTask, compute: Callable[..., Any]
    ) -> tuple[Tensor, ...]:
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        ctx.scale = FP16_SCALE if hidden.dtype == torch.float16 else 1.0
        chunks = _chunks(hidden, task)
        # several chunks are added up in fp32; a single chunk is rounded once, as without fusion
        sum_dtype = weight.dtype if len(chunks) == 1 else torch.promote_types(weight.dtype, torch.float32)
        hidden_gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format) if for_hidden else None
        weight_gradient: Tensor | None = None
        bias_gradient = weight.new_zeros(weight.shape[0], dtype=sum_dtype) if for_bias else None
        sums, done = [], 0
        for rows, labels, *extra_targets in chunks:
            logits = F.linear(rows, weight, bias)
            chunk_sums, gradient = compute(
                task.objective, logits.unsqueeze(0), labels, tuple(extra_targets), task.vocabulary, ctx.scale
            )
            sums.append(chunk_sums)
            gradient = gradient.flatten(0, 1)
            del logits
            if hidden_gradient is not None:
                torch.mm(gradient, weight, out=hidden_gradient.view(-1, weight.shape[1])[done : done + len(rows)])
                done += len(rows)
            if for_weight:
                weight_gradient = _accumulated(weight_gradient, gradient.t(), rows, sum_dtype)
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0, dtype=sum_dtype)
            del gradient
        ctx.save_for_backward(hidden_gradient, weight_gradient, bias_gradient)
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype)
        total, *parts = _added(sums)
        ctx.mark_non_differentiable(*parts)
        return total, *parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factor = grads[0] / ctx.scale
        scaled = [_scaled(*pair, factor) for pair in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return *scaled, None, None


def _loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, task: LossTask) -> tuple[Tensor, ...]:
    """Computes (total, *parts) without gradients."""
    sums = []
    for rows, labels, *extra_targets in _chunks(hidden, task):
        logits = F.linear(rows, weight, bias).unsqueeze(0)
        sums.append(total_and_parts(task.objective(logits, labels, *extra_targets, vocabulary=task.vocabulary)))
    return _added(sums)


def _chunks(hidden: Tensor, task: LossTask) -> list[tuple[Tensor, ...]]:
    """Splits into chunks of nearly equal size: (hidden states [r, D], labels [1, r], extra targets [1, r, ...])."""
    count = hidden.shape[:-1].numel()
    pieces = -(-count // task.rows)
    size = -(-count // pieces)
    beside = [each.flatten(0, 1).unsqueeze(0).split(size, dim=1) for each in (task.labels, *task.extra_targets)]
    return list(zip(hidden.reshape(count, -1).split(size), *beside, strict=True))


def _added(sums: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(column).sum() for column in zip(*sums, strict=True))


def _scaled(saved: Tensor | None, dtype: torch.dtype, factor: Tensor) -> Tensor | None:
    if saved is None:
        return None
    # one pass over the memory: the product is rounded to the other dtype while it is written
    return torch.mul(saved, factor.to(saved.dtype), out=torch.empty_like(saved, dtype=dtype))


def _accumulated(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Adds left @ right to `total`, in `dtype`; with operands of half precision, sums are in fp32."""
    if left.dtype == dtype:
        # not addmm_, which torch's FLOP counter does not count
        return left @ right if total is None else torch.addmm(total, left, right, out=total)
    if total is None:
        total = left.new_zeros((left.shape[0], right.shape[1]), dtype=dtype)
    _add_product(total, left, right)
    return total


# A separate operator, because torch 2.13's FLOP counter fails on addmm with out_dtype.
@torch.library.custom_op("headrace::add_product", mutates_args=("total",))
def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


@_add_product.register_fake
def _(total: Tensor, left: Tensor, right: Tensor) -> None: ...


@register_flop_formula(torch.ops.headrace.add_product)
def _flops(_total: Any, left: Any, right: Any, **_kwargs: Any) -> int:
    flops: int = mm_flop(left, right)
    return flops
