"""Runs a tiny model with recurrent blocks as context-parallel ranks, and computes its loss and every gradient.

Ranks are threads of one process (`simulated_ranks`). Attention is computed whole on every rank, so that any number of
heads can be tried: rings and Ulysses have trials of their own.

Shapes: B samples, T positions of a rank, S of the full sequence, H heads, d head size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.topology import sequence_chunks
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.decoder import Decoder, DecoderLayout, parameter_owners
from pipeline.engines.parallel.recurrent import SequenceRanks, apply_recurrent, recurrent_blocks
from pipeline.engines.parallel.sharded_trial import LossGradients
from pipeline.engines.parallel.simulated_ranks import run_ranks
from pipeline.models.attention import attend
from pipeline.models.masks import make_mask


@dataclass(frozen=True)
class _WholeAttention:
    """Attention of all heads and positions on every rank."""

    ranks: SequenceRanks
    make_mask = staticmethod(make_mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, watch: Any = None, **options: Any) -> Tensor:  # noqa: ARG002
        """Implements `ContextParallelAttention.attend`."""
        length = query.shape[2] * self.ranks.count
        whole = (self.ranks.gathered(each.transpose(1, 2), length).transpose(1, 2) for each in (query, key, value))
        return self.ranks.own(attend(*whole, **options).transpose(1, 2)).transpose(1, 2)


def sequence_gradients(
    model: nn.Module, layout: DecoderLayout, batch: MicroBatch, *, ranks: int, zigzag: bool
) -> LossGradients:
    """Computes loss and gradients of context-parallel ranks.

    Args:
        model: the tiny model; not changed.
        layout: layout without context parallelism.
        batch: whole sequences, which `ranks` divides, and with zigzag 2 x `ranks`.
        ranks: number of ranks; 1 for the reference.
        zigzag: whether each rank has two chunks.
    """
    results = run_ranks(ranks, partial(_rank_gradients, model, layout, batch, zigzag and ranks > 1))
    found: dict[str, Tensor] = {}
    for name in {name for _, gradients in results for name in gradients}:
        found[name] = torch.stack([gradients[name] for _, gradients in results if name in gradients]).sum(0)
    return LossGradients(sum(loss for loss, _ in results), found)


def _rank_gradients(
    model: nn.Module, layout: DecoderLayout, batch: MicroBatch, zigzag: bool, group: dist.ProcessGroup
) -> tuple[float, dict[str, Tensor]]:
    """Returns a rank's summands of the loss and of every gradient."""
    causal, size = copy.deepcopy(model).eval(), group.size()
    ranks = SequenceRanks(cp=group if size > 1 else None, zigzag=zigzag)
    chunks = sequence_chunks(batch.labels.shape[1], cp=size, cp_rank=group.rank(), zigzag=zigzag)
    own = torch.cat([torch.arange(each.start, each.stop) for each in chunks])
    parts = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "documents"}
    part = replace(batch, **{name: value[:, own] for name, value in parts.items() if value is not None})
    layout = replace(
        layout,
        recurrent=apply_recurrent(causal, ranks, blocks=recurrent_blocks(causal)),
        cp_attention=_WholeAttention(ranks) if size > 1 else None,
        chunks=chunks,
        cp_size=size,
    )
    total = Decoder(causal, layout, parameter_owners(causal))(part.input_ids, part, CrossEntropy())[0]
    total.backward()
    gradients = {name: p.grad for name, p in causal.named_parameters() if p.grad is not None}
    return float(total.detach()), gradients
