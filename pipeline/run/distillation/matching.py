"""Losses that compare hidden states and attention relations of student and teacher, on one rank of any layout.

Each is the mean over the mapped layers, summed over target tokens. Hidden states are the outputs of layers (the
residual stream, before any final norm), compared by the similarity loss of `relations` or, for models of equal width,
by

- mse: mean over features of (s - t)^2 (Jiao et al. 2020, TinyBERT, arXiv:1909.10351, section 3.1),
- cosine: 1 - cos(s, t) (Sanh et al. 2019, DistilBERT, arXiv:1910.01108).

For attention the KL of self-attention relations of queries, keys and values is averaged (Wang et al. 2021, MiniLMv2,
arXiv:2012.15828, section 3.1): a token's features of all heads, after rotary embedding, are divided into R relation
heads, in the order of the heads. No loss has parameters, so checkpoints, exports and optimizers are unaffected.

A rank computes the rows of its own tokens (hidden states) or its relation heads (attention); columns are all-gathered
over the ranks of a sequence, and their gradients reduce-scattered. The caller sums over a tp group.

Shapes: B samples, T positions of this rank's cp chunk, D features, H heads, d head size, R relation heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pipeline.config.sections.compression import AttentionsSection, HiddenStatesSection
from pipeline.config.topology import sequence_chunks
from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.engines.parallel.collectives import all_gather
from pipeline.engines.parallel.features import Features, WantedFeatures
from pipeline.engines.parallel.mesh import Mesh
from pipeline.run.distillation.relations import Pairs, Vectors, relation_loss

_INDEX = {"query": 0, "key": 1, "value": 2}


@dataclass(frozen=True)
class SequenceShard:
    """The positions of a sequence on this rank, and the groups with the other positions.

    Attributes:
        chunk: int64 [T], positions of this rank's cp chunk, in order.
        all: int64 [S], positions of all cp ranks, in the order of the ranks.
        tp, cp: groups of tensor and context parallelism; None for a single rank.
    """

    chunk: Tensor
    all: Tensor
    tp: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: Mesh | None, device: torch.device, *, length: int, cp: int, zigzag: bool) -> SequenceShard:
        """Makes the shard of this rank; for the arguments see `sequence_chunks`."""
        chunks = [
            torch.cat([torch.arange(part.start, part.stop, device=device) for part in parts])
            for parts in (sequence_chunks(length, cp=cp, cp_rank=rank, zigzag=zigzag) for rank in range(cp))
        ]
        if mesh is None:
            return cls(chunks[0], chunks[0])
        return cls(chunks[mesh.coordinates["cp"]], torch.cat(chunks), mesh.group("tp"), mesh.group("cp"))

    def rows(self, values: Tensor, *, dim: int) -> Tensor:
        """Returns this rank's part of its chunk between tensor-parallel blocks (sequence parallelism)."""
        if self.tp is None:
            return values
        return values.chunk(dist.get_world_size(self.tp), dim=dim)[dist.get_rank(self.tp)]

    def columns(self, values: Tensor, *, dim: int, over_tp: bool) -> Tensor:
        """Gathers the values of the whole sequence from each rank's part."""
        if over_tp and self.tp is not None:
            values = all_gather(values, self.tp, dim=dim)
        return values if self.cp is None else all_gather(values, self.cp, dim=dim)


class HiddenStateLoss:
    """The loss that matches hidden states.

    Args:
        section: weight and loss.
        layers: student's layer -> teacher's.
        shard: this rank's positions.
    """

    part = "hidden_states"

    def __init__(self, section: HiddenStatesSection, layers: Mapping[int, int], shard: SequenceShard) -> None:
        self.weight, self.shard = section.weight, shard
        self._kind, self._layers = section.loss, dict(layers)

    def wanted(self, *, teacher: bool) -> WantedFeatures:
        """Returns the layers to record."""
        return WantedFeatures(hidden=frozenset(self._layers.values() if teacher else self._layers))

    def __call__(self, student: Features, teacher: Features, batch: MicroBatch) -> Tensor:
        """Computes the mean loss over layers, summed over this rank's targets."""
        counts = self.shard.rows((batch.labels != IGNORE).float(), dim=1)
        pairs = [(student.hidden[own], teacher.hidden[theirs]) for own, theirs in self._layers.items()]
        return torch.stack([self._layer(*pair, batch, counts) for pair in pairs]).mean()

    def _layer(self, student: Tensor, teacher: Tensor, batch: MicroBatch, counts: Tensor) -> Tensor:
        if self._kind == "mse":
            return ((student.float() - teacher.float()).square().mean(-1) * counts).sum()
        if self._kind == "cosine":
            return ((1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)) * counts).sum()
        rows = self.shard.rows(self.shard.chunk, dim=0)
        pairs = Pairs(rows, self.shard.all, counts, batch.documents)
        return relation_loss("similarity", self._directions(student), self._directions(teacher), pairs)

    def _directions(self, states: Tensor) -> Vectors:
        """Normalizes hidden states [B, T / tp, D] to vectors of length 1 in one relation head."""
        rows = F.normalize(states.float(), dim=-1)[:, None]
        return Vectors(rows, self.shard.columns(rows, dim=2, over_tp=True))


class AttentionLoss:
    """The loss that matches self-attention relations.

    Args:
        section: weight, and the kinds of relations.
        layers: student's layer -> teacher's.
        heads: number of relation heads of both models.
        shard: this rank's positions.
    """

    part = "attentions"

    def __init__(
        self, section: AttentionsSection, layers: Mapping[int, int], *, heads: int, shard: SequenceShard
    ) -> None:
        self.weight, self.shard, self._layers = section.weight, shard, dict(layers)
        self._which = [_INDEX[name] for name in section.relations]
        self._ranks = 1 if shard.tp is None else dist.get_world_size(shard.tp)
        self._heads = heads // self._ranks

    def wanted(self, *, teacher: bool) -> WantedFeatures:
        """Returns the layers to record."""
        return WantedFeatures(attention=frozenset(self._layers.values() if teacher else self._layers))

    def __call__(self, student: Features, teacher: Features, batch: MicroBatch) -> Tensor:
        """Computes the mean loss over layers and relations for this rank's relation heads, summed over targets."""
        counts = (batch.labels != IGNORE).float() / self._ranks  # the mean over heads is the mean over ranks
        pairs = Pairs(self.shard.chunk, self.shard.all, counts, batch.documents)
        losses = [
            relation_loss(
                "kl",
                self._vectors(student.attention[own][index]),
                self._vectors(teacher.attention[theirs][index]),
                pairs,
            )
            for own, theirs in self._layers.items()
            for index in self._which
        ]
        return torch.stack(losses).mean()

    def _vectors(self, states: Tensor) -> Vectors:
        """Reshapes [B, H / tp, T, d] to vectors [B, R / tp, T, H d / R]."""
        samples, _heads, length, _size = states.shape
        rows = states.transpose(1, 2).reshape(samples, length, self._heads, -1).transpose(1, 2)
        return Vectors(rows, self.shard.columns(rows, dim=2, over_tp=False))
