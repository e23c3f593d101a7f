"""Expert parallelism: each rank of an ep group has some of the experts; all-to-alls send tokens to experts and back.

transformers stores the experts of a layer in stacked parameters [E, ...] of one module, and calls the function
registered under `config._experts_implementation`. This module registers one; the router and the rest of a layer stay
unchanged.

A row is a token for one of its experts. No row is dropped: a rank computes all rows that it gets. `ExpertExchange` is
the interface of an exchange. `AllToAll` uses torch.distributed and has no capacity limit: ranks tell each other how
many rows they send. One gather sorts rows by expert, another sorts them back. A token's expert outputs are added up on
the token's rank, in the order in which the router chose the experts. `fused_kernels` has other exchanges.

The host reads the number of rows once per layer, since an all-to-all needs the sizes of its parts. Selective activation
checkpointing keeps sizes and exchanged rows; full checkpointing exchanges them again in the backward pass. With another
micro-batch's pass beside it (`passes`) only the exchange of rows overlaps, not that of sizes. The exchange of rows
cannot begin before the sizes are read, and kernels already launched by the other pass would delay it by as much as the
device is now idle, from the read to the next launch.

Shapes: N tokens on this rank, K experts per token, R ranks in the group, E experts, L = E / R experts on this rank, M
rows for this rank, D features, F features of an expert.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from foundation.errors import ConfigError
from pipeline.config.topology import largest_divisor
from pipeline.engines.parallel.activation_checkpointing import restores_results
from pipeline.engines.parallel.collectives import functional, host_sizes
from pipeline.engines.parallel.overlapped_passes import OverlappedPasses
from pipeline.models.construction.rectangle import Rectangle
from pipeline.models.grouped_products import grouped_product
from pipeline.models.routers import has_experts

NAME = "headrace_ep"
"""Name of our function for `_experts_implementation`."""

_EXCHANGE = "expert_exchange"
"""Attribute of a module of experts: its `ExpertExchange`."""


_ALIGNMENT = 16
"""Bytes that must divide the size of a row in either operand of `grouped_mm`."""


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the modules of stacked experts that transformers calls through its interface, with their names."""
    for name, module in model.named_modules():
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "is_transposed"):
            yield name, module


def check_expert_parallel(model: nn.Module, *, ep: int, ranks: int | None = None) -> None:
    """Refuses expert parallelism that a model does not support.

    Args:
        model: a full Hugging Face causal language model, on any device.
        ep: size of the ep axis.
        ranks: number of ranks of a pipeline stage, which ep has to divide, too; by default `ep`.

    Raises:
        ConfigError: the model is dense, transformers does not stack its experts, or ep does not divide a number.
    """
    config: Any = model.config
    found = list(expert_modules(model))
    if not found:
        sparse = has_experts(config.to_dict())
        why = f"transformers does not call the experts of {config.model_type} through its interface of experts"
        why = why if sparse else f"{config.model_type} has no experts: it is a dense model"
        raise ConfigError("parallel.ep", ep, why=why, remedy="remove parallel.ep" + (": ZeRO 3 shards them" * sparse))
    for name, module in found:
        experts = module.num_experts
        _, *sizes = module.down_proj.shape
        aligned = _ALIGNMENT // module.down_proj.element_size()
        if any(size % aligned for size in sizes):
            why = f"grouped products take sizes that are multiples of {aligned}, and {name}.down_proj is {sizes}"
            raise ConfigError("parallel.ep", ep, why=why, remedy=f"use multiples of {aligned}, or remove parallel.ep")
        others = [each for each, p in module.named_parameters() if p.shape[:1] != (experts,)]
        if others:
            why = f"{name}.{others[0]} belongs to all experts of a layer, and would be on every rank"
            raise ConfigError("parallel.ep", ep, why=why, remedy="remove parallel.ep: ZeRO 3 shards them")
        if experts % ep:
            near = largest_divisor(gcd(experts, ranks or ep), most=ep)
            why = f"it does not divide the {experts} experts of {name}"
            remedy = f"use {near}" if near > 1 else "remove parallel.ep: no size divides both the experts and the ranks"
            raise ConfigError("parallel.ep", ep, why=why, remedy=remedy)


class ExpertExchange(ABC):
    """The exchange of one layer's rows between the ranks that have its experts.

    Args:
        name: name of the module of experts, for messages.
        group: the ep ranks; None for only this rank.
        experts: E.

    Attributes:
        product: function that multiplies rows by their experts' matrices; `grouped_product` by default.
        largest: largest M of a forward pass since this attribute was set to 0.
        imbalance: M / (N K) to assume for fake tensors, which have no values; None to read M.
        passes: runner of another micro-batch's pass while rows are exchanged; None to wait for the exchange.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None, *, experts: int) -> None:
        self._name, self._group = name, group
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._experts, self._local = experts, experts // self._ranks
        self.product: Callable[[Tensor, Tensor, Tensor, bool], Tensor] = grouped_product
        self._rows = 0
        self.largest = 0
        self.imbalance: float | None = None
        self.passes: OverlappedPasses | None = None

    @abstractmethod
    def dispatch(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Sends tokens to the ranks of their experts, and calls `received`.

        Args:
            hidden: tokens [N, D].
            chosen: experts of the tokens, int64 [N, K].
            weights: the router's weights of these experts [N, K].

        Returns:
            Rows [M, D] for this rank's experts, sorted by expert; the number of rows of each expert, int64 [L]; and the
            argument `dispatched` of `combine`.
        """

    @abstractmethod
    def combine(self, rows: Tensor, dispatched: Any) -> Tensor:
        """Combines experts' outputs [M, D] to the tokens' weighted sums [N, D], on the tokens' ranks."""

    def received(self, rows: Tensor) -> Tensor:
        """Counts the rows [M, D] that this rank got, and returns them."""
        self._rows = len(rows)
        if torch._C._current_graph_task_id() == -1:  # not in a recomputation
            self.largest = max(self.largest, len(rows))
        return rows

    def run(self, module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Maps tokens [N, D], experts int64 [N, K] and weights [N, K] to sums over each token's experts [N, D]."""
        self._rows = 0
        try:
            rows, counts, dispatched = self.dispatch(hidden, chosen, weights)
            rows = self._computed(module, rows, counts)
            return self.combine(rows, dispatched).to(hidden.dtype)
        except torch.OutOfMemoryError as error:
            mean = chosen.numel()
            error.add_note(f"{self._name}: its experts on this rank got {self._rows:,} rows, and {mean:,} are the mean")
            raise

    def _computed(self, module: Any, rows: Tensor, counts: Tensor) -> Tensor:
        """Computes the experts' outputs [M, D] for rows [M, D] sorted by expert, `counts` [L] per expert."""
        ends = counts.cumsum(0, dtype=torch.int32)
        experts = torch.arange(self._local, device=rows.device)
        experts = experts.repeat_interleave(counts, output_size=len(rows)) if module.has_bias else experts
        rows = _product(module, "gate_up_proj" if module.has_gate else "up_proj", rows, ends, experts)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        return _product(module, "down_proj", rows, ends, experts)


class AllToAll(ExpertExchange):
    """Exchange by all-to-alls of torch.distributed."""

    def dispatch(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Implements `ExpertExchange.dispatch`. Rows arrive by rank, and per rank by expert, and are sorted here."""
        order, inverse = _sorted(chosen.reshape(-1))
        sent = torch.zeros(self._experts, dtype=torch.int64, device=chosen.device)
        sent.scatter_add_(0, chosen.reshape(-1), torch.ones_like(order))
        received, sizes = self._sizes(sent, len(order))
        rows = _Spread.apply(hidden, order, inverse, chosen.shape[1])
        rows = self.received(self._exchanged(rows, sizes))
        experts = torch.arange(self._local, device=rows.device).repeat(len(received))
        here = _sorted(experts.repeat_interleave(received.reshape(-1), output_size=len(rows)))
        return _permuted(rows, *here), received.sum(0), (here, sizes[::-1], (inverse, order), weights)

    def combine(self, rows: Tensor, dispatched: Any) -> Tensor:
        """Implements `ExpertExchange.combine`. A token's expert outputs are added up in the order of their weights."""
        (order, inverse), sizes, back, weights = dispatched
        rows = self._exchanged(_permuted(rows, inverse, order), sizes)
        rows = _permuted(rows, *back) * weights.reshape(-1, 1)
        return rows.view(*weights.shape, rows.shape[1]).sum(1)

    def _exchanged(self, rows: Tensor, sizes: list[list[int]]) -> Tensor:
        """Sends `sizes[0][r]` rows to each rank r; returns the `sizes[1][r]` rows from each, in the ranks' order."""
        if self._group is None:
            return rows
        got: Tensor = _RowExchange.apply(rows, sizes[0], sizes[1], self._group, self.passes)
        return got

    def _sizes(self, sent: Tensor, total: int) -> tuple[Tensor, list[list[int]]]:
        """Exchanges rows per expert [E]; returns rows per rank and expert here [R, L], and sizes (sent, received)."""
        if self._group is None:
            return sent[None], []
        parts = [self._local] * self._ranks
        received = functional.wait_tensor(
            functional.all_to_all_single(sent, parts, parts, self._group.group_name)
        ).view(self._ranks, self._local)
        sizes = host_sizes(torch.stack([sent.view(self._ranks, -1).sum(1), received.sum(1)]))
        if self.imbalance is not None:
            return received, [_even(total, self._ranks), _even(round(total * self.imbalance), self._ranks)]
        return received, sizes.tolist()


def apply_expert_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    *,
    names: dict[int, str],
    exchange: Callable[..., ExpertExchange] = AllToAll,
) -> dict[str, Rectangle]:
    """Shards the experts of a model on meta in place; its layers then exchange rows with other ranks.

    Args:
        model: a full Hugging Face causal language model, or a stage of it, that `check_expert_parallel` accepted.
        group: the ep ranks.
        names: id of a parameter -> its name in the full model.
        exchange: function that makes the exchange of a layer, with the arguments of `ExpertExchange`.

    Returns:
        Name of every sharded parameter -> this rank's experts in it.
    """
    boxes: dict[str, Rectangle] = {}
    for name, module in expert_modules(model):
        experts = module.num_experts
        attach_exchange(module, name, group, exchange=exchange)
        if group is None:
            continue
        module.num_experts = local = experts // dist.get_world_size(group)
        for key, full in list(module._parameters.items()):
            if full is not None:
                rows = Rectangle.full(full.shape).rows(local * dist.get_rank(group), local)
                boxes[names[id(full)]] = rows
                module._parameters[key] = nn.Parameter(full.new_empty(rows.sizes), requires_grad=full.requires_grad)
    return boxes


def attach_exchange(
    module: Any,
    name: str,
    group: dist.ProcessGroup | None,
    *,
    exchange: Callable[..., ExpertExchange] = AllToAll,
) -> ExpertExchange:
    """Makes a module of experts use our function; returns its exchange, which may exist already."""
    if not hasattr(module, _EXCHANGE):
        setattr(module, _EXCHANGE, exchange(name, group, experts=module.num_experts))
        module.config = copy.copy(module.config)  # other models may share the config
        module.config._experts_implementation = NAME
    found: ExpertExchange = getattr(module, _EXCHANGE)
    return found


def exchanges(model: nn.Module) -> list[ExpertExchange]:
    """Returns the exchanges of a model's layers; none if transformers' own function computes the experts."""
    return [getattr(module, _EXCHANGE) for module in model.modules() if hasattr(module, _EXCHANGE)]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes that the host reads
def _forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    exchange: ExpertExchange = getattr(module, _EXCHANGE)
    return exchange.run(module, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)


def _even(total: int, ranks: int) -> list[int]:
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


def _sorted(experts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the order that sorts rows by expert, and its inverse."""
    order = experts.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return order, inverse


def _product(module: Any, name: str, rows: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
    """Multiplies every row by its expert's matrix [F, D] ([D, F] if `is_transposed`), and adds the expert's bias."""
    weight: Tensor = getattr(module, name)
    exchange: ExpertExchange = getattr(module, _EXCHANGE)
    product = exchange.product(rows.to(weight.dtype), weight, ends, module.is_transposed)
    return product + getattr(module, f"{name}_bias")[experts] if module.has_bias else product


def _all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, passes: OverlappedPasses | None
) -> Tensor:
    begun = functional.all_to_all_single(rows.contiguous(), received, sent, group.group_name)
    if passes is not None and not restores_results():
        passes.hand_over()
    got: Tensor = functional.wait_tensor(begun)
    return got


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
        passes: OverlappedPasses | None,
    ) -> Tensor:
        ctx.sizes, ctx.group, ctx.passes = (received, sent), group, passes
        return _all_to_all(rows, sent, received, group, passes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.sizes
        return _all_to_all(grads[0], sent, received, ctx.group, ctx.passes), None, None, None, None


class _Spread(torch.autograd.Function):
    """Maps tokens [N, D] to rows [N K, D] in an order. A token's gradient is summed in the order of its experts."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, inverse: Tensor, each: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.shape = (len(hidden), each, hidden.shape[1])
        return hidden[order // each]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse].view(ctx.shape).sum(1), None, None, None


def _permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Puts rows in an order, whose inverse is given."""
    found: Tensor = _Permuted.apply(rows, order, inverse)
    return found


class _Permuted(torch.autograd.Function):
    """Implements `_permuted`; the backward pass is a gather, too, where autograd's own would sum row by row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None
