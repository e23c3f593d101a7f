"""Kernels of DeepEP and HybridEP as `RowKernels`: see README.md. The package is imported when the first layer runs.

Shapes: as in `pipeline.engines.parallel.experts`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pipeline.engines.parallel.fused_exchange import Handle


class DeepEP:
    """DeepEP's version 2, with one row for each of a token's experts (`do_expand`), in a deterministic order.

    A rank adds up a token's rows before it sends them (`allow_multiple_reduction`, the default); this is required if
    gradients of weights are sent with the rows.

    Args:
        group: the ranks.
        experts: E.
        tokens: the largest N.
    """

    dtype = torch.bfloat16

    def __init__(self, group: dist.ProcessGroup, *, experts: int, tokens: int) -> None:
        self._group, self._experts, self._tokens = group, experts, tokens
        self._made: Any = None

    def dispatch(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """Implements `RowKernels.dispatch`. The host reads the counts."""
        package = _package()
        if self._made is None:
            sizes = {"num_max_tokens_per_rank": self._tokens, "hidden": hidden.shape[1], "num_topk": chosen.shape[1]}
            self._made = package.ElasticBuffer(self._group, **sizes, deterministic=True)
        rows, _, here, handle, _ = self._made.dispatch(
            hidden,
            topk_idx=chosen.to(package.topk_idx_t).contiguous(),
            topk_weights=weights,
            num_experts=self._experts,
            expert_alignment=1,
            do_expand=True,
        )
        counts = torch.tensor(handle.num_recv_tokens_per_expert_list, device=hidden.device)
        return rows, here, counts, tuple(part for pair in vars(handle).items() for part in pair)

    def dispatch_again(self, hidden: Tensor, handle: Handle, *, rows: int) -> Tensor:
        """Implements `RowKernels.dispatch_again`. With a handle, the package does not compute `num_sms`."""
        record = _record(handle)
        found: Tensor = self._made.dispatch(hidden, handle=record, num_sms=record.num_sms, do_expand=True)[0]
        assert len(found) == rows, (len(found), rows)
        return found

    def combine(self, rows: Tensor, weights: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
        """Implements `RowKernels.combine`."""
        combined: tuple[Tensor, Tensor | None] = self._made.combine(rows, _record(handle), topk_weights=weights)[:2]
        return combined


def _record(handle: Handle) -> Any:
    """Returns DeepEP's object in a handle."""
    record = object.__new__(_package().EPHandle)
    vars(record).update(zip(handle[::2], handle[1::2], strict=True))
    return record


class HybridEP:
    """NVIDIA's HybridEP, which permutes rows to experts. Every rank passes the same number of tokens.

    Args:
        group: the ranks.
        experts: E.
        tokens: the largest N.
    """

    dtype = torch.bfloat16

    def __init__(self, group: dist.ProcessGroup, *, experts: int, tokens: int) -> None:
        self._group, self._experts, self._tokens = group, experts, -(-tokens // _CHUNK) * _CHUNK
        self._local = experts // dist.get_world_size(group)
        self._made: Any = None

    def dispatch(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """Implements `RowKernels.dispatch`. The host waits for the counts; padding tokens go to no expert."""
        if self._made is None:
            self._made = _package().HybridEPBuffer(
                group=self._group,
                hidden_dim=hidden.shape[1],
                max_num_of_tokens_per_rank=self._tokens,
                num_local_experts=self._local,
            )
        dense = weights.new_zeros(self._tokens, self._experts)
        routed = torch.zeros_like(dense, dtype=torch.bool)
        dense[: len(hidden)].scatter_(1, chosen, weights)
        routed[: len(hidden)].scatter_(1, chosen, True)
        rows, here, _, counts, record = self._made.dispatch_with_permute(
            hidden=self._filled(hidden), routing_map=routed, probs=dense, num_of_experts_per_rank=self._local
        )
        return rows, here, counts.to(hidden.device, torch.int64), (chosen, *record)

    def dispatch_again(self, hidden: Tensor, handle: Handle, *, rows: int) -> Tensor:
        """Implements `RowKernels.dispatch_again`."""
        found: Tensor = self._made.dispatch_with_permute(
            hidden=self._filled(hidden), handle=handle[1:], num_permuted_tokens=rows
        )[0]
        return found

    def combine(self, rows: Tensor, weights: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
        """Implements `RowKernels.combine`."""
        chosen, *record = handle
        hidden, dense = self._made.combine_with_unpermute(hidden=rows, probs=weights, handle=tuple(record))
        count = len(chosen)
        return hidden[:count], None if weights is None else dense[:count].gather(1, chosen)

    def _filled(self, hidden: Tensor) -> Tensor:
        return F.pad(hidden, (0, 0, 0, self._tokens - len(hidden)))


_CHUNK = 64
"""HybridEP's tokens per chunk: a divisor of a rank's number of tokens."""


def _package() -> Any:
    """Imports the package with both exchanges, which few machines have."""
    return import_module("deep_ep")
