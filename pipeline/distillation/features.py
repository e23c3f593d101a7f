"""Matching of hidden states and attention relations: a distillation that also compares what is computed on the way.

loss = that of the distillation + w_h H + w_a A, summed over target tokens. H is the mean over the mapped layers of the
similarity loss of `relations` between outputs of the layers, or of models of one width

- mse: mean over features of (s - t)^2 (Jiao et al. 2020, TinyBERT, arXiv:1909.10351, section 3.1),
- cosine: 1 - cos(s, t) (Sanh et al. 2019, DistilBERT, arXiv:1910.01108).

A is the mean over mapped layers and over queries, keys and values of the KL of their self-attention relations
(MiniLMv2). There the features of all attention heads of a token, rotated, are divided into R relation heads, in the
order of the heads. None of them has parameters, so that checkpoints, exports and optimizers do not know of it.

The output of a layer is the residual stream after it, before any final norm.

In a pipeline the last stage has the teacher, so that only its layers of the student can be matched.

In every layout a rank computes the rows of its own tokens (hidden states) or its relation heads (attention); columns
are all-gathered over the ranks of a sequence, and their gradients reduce-scattered.

Shapes: B samples, T positions of this rank's cp chunk, D features, H heads, d head size, R relation heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.compression_schema import AttentionsSection, HiddenStatesSection
from pipeline.config.feature_rules import ATTENTIONS, HIDDEN, layer_map, relation_heads
from pipeline.config.rules import ResolvedRun
from pipeline.data.loader import IGNORE, MicroBatch
from pipeline.distillation.feature_checks import sizes_of
from pipeline.distillation.objective import Distillation
from pipeline.distillation.relations import Pairs, Vectors, relation_loss
from pipeline.distillation.teacher import Teacher
from pipeline.engines.objective import Loss
from pipeline.parallel.collectives import all_gather
from pipeline.parallel.features import Features, Wanted, decoder_layers, recording
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard
from pipeline.topology import sequence_chunks

_INDEX = {"query": 0, "key": 1, "value": 2}


@dataclass(frozen=True)
class SequenceShard:
    """Which positions this rank has, and the groups that have the others.

    Attributes:
        chunk: int64 [T], positions of this rank's cp chunk, in order.
        all: int64 [S], those of all cp ranks, in the order of the ranks.
        tp, cp: the ranks of tensor and context parallelism; None for one.
    """

    chunk: Tensor
    all: Tensor
    tp: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, run: ResolvedRun, mesh: Mesh | None, device: torch.device) -> SequenceShard:
        """That of a rank of a run."""
        length, cp = run.batch.sequence_length, run.topology.cp
        chunks = [
            torch.cat([torch.arange(part.start, part.stop, device=device) for part in parts])
            for parts in (sequence_chunks(length, cp=cp, cp_rank=rank, zigzag=run.zigzag) for rank in range(cp))
        ]
        if mesh is None:
            return cls(chunks[0], chunks[0])
        return cls(chunks[mesh.coordinates["cp"]], torch.cat(chunks), mesh.group("tp"), mesh.group("cp"))

    def rows(self, values: Tensor, *, dim: int) -> Tensor:
        """The part of this rank's chunk that it has between the blocks of a tensor-parallel model."""
        if self.tp is None:
            return values
        return values.chunk(dist.get_world_size(self.tp), dim=dim)[dist.get_rank(self.tp)]

    def columns(self, values: Tensor, *, dim: int, over_tp: bool) -> Tensor:
        """The values of the whole sequence from those of this rank."""
        if over_tp and self.tp is not None:
            values = all_gather(values, self.tp, dim=dim)
        return values if self.cp is None else all_gather(values, self.cp, dim=dim)


class HiddenStateLoss:
    """The matching of hidden states.

    Args:
        section: weight and loss.
        layers: student's layer -> teacher's.
        shard: of this rank.
    """

    part = "hidden_states"

    def __init__(self, section: HiddenStatesSection, layers: Mapping[int, int], shard: SequenceShard) -> None:
        self.weight, self.shard = section.weight, shard
        self._kind, self._layers = section.loss, dict(layers)

    def wanted(self, *, teacher: bool) -> Wanted:
        """The layers to record."""
        return Wanted(hidden=frozenset(self._layers.values() if teacher else self._layers))

    def __call__(self, student: Features, teacher: Features, batch: MicroBatch) -> Tensor:
        """The mean over layers of the loss, summed over this rank's targets."""
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
        """Hidden states [B, T / tp, D] -> vectors of length 1 in one relation head."""
        rows = F.normalize(states.float(), dim=-1)[:, None]
        return Vectors(rows, self.shard.columns(rows, dim=2, over_tp=True))


class AttentionLoss:
    """The matching of self-attention relations.

    Args:
        section: weight, and what is related.
        layers: student's layer -> teacher's.
        heads: relation heads of both models.
        shard: of this rank.
    """

    part = "attentions"

    def __init__(
        self, section: AttentionsSection, layers: Mapping[int, int], *, heads: int, shard: SequenceShard
    ) -> None:
        self.weight, self.shard, self._layers = section.weight, shard, dict(layers)
        self._which = [_INDEX[name] for name in section.relations]
        self._ranks = 1 if shard.tp is None else dist.get_world_size(shard.tp)
        self._heads = heads // self._ranks

    def wanted(self, *, teacher: bool) -> Wanted:
        """The layers to record."""
        return Wanted(attention=frozenset(self._layers.values() if teacher else self._layers))

    def __call__(self, student: Features, teacher: Features, batch: MicroBatch) -> Tensor:
        """The mean over layers and relations of the loss, summed over targets; of this rank's relation heads."""
        counts = (batch.labels != IGNORE).float() / self._ranks  # the mean over all heads is that of the ranks' means
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
        """[B, H / tp, T, d] -> vectors [B, R / tp, T, H d / R]."""
        samples, _heads, length, _size = states.shape
        rows = states.transpose(1, 2).reshape(samples, length, self._heads, -1).transpose(1, 2)
        return Vectors(rows, self.shard.columns(rows, dim=2, over_tp=False))


class FeatureDistillation:
    """A distillation with matching; an `engines.objective.Objective` and a `parallel.features.FeatureLoss`.

    Args:
        distillation: the loss of the logits, from the same teacher.
        teacher: in memory; its features are recorded in the forward pass that gives its targets.
        matchings: one or two.
    """

    def __init__(
        self, distillation: Distillation, teacher: Teacher, matchings: list[HiddenStateLoss | AttentionLoss]
    ) -> None:
        self._distillation, self._teacher, self._matchings = distillation, teacher, matchings
        self.wanted, self._wanted_of_teacher = (
            _union([each.wanted(teacher=which) for each in matchings]) for which in (False, True)
        )
        self.parts = (*distillation.parts, *(each.part for each in matchings))
        self._tp = matchings[0].shard.tp
        self._features: Features | None = None

    def extra_targets(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """See `Distillation.extra_targets`; the teacher's features are kept for `matched`."""
        with recording(self._teacher.decoder, self._wanted_of_teacher) as self._features:
            return self._distillation.extra_targets(batch)

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        """The loss of the logits alone; see `Distillation`."""
        return self._distillation(logits, labels, *extra_targets, vocabulary=vocabulary)

    def with_gradient(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> tuple[Loss, Tensor]:
        """See `Objective.with_gradient`; of the logits alone."""
        return self._distillation.with_gradient(logits, labels, *extra_targets, vocabulary=vocabulary)

    def matched(self, features: Features, batch: MicroBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `FeatureLoss.matched`; the same on every rank of a tp group, with the gradient of this rank's part."""
        teacher, self._features = self._features, None
        assert teacher is not None, "the teacher has not been run on this batch"
        own = torch.stack([each(features, teacher, batch) for each in self._matchings])
        sums: Tensor = own if self._tp is None else _SumOver.apply(own, self._tp)
        weights = sums.new_tensor([each.weight for each in self._matchings])
        return sums @ weights, tuple(sums.detach().unbind())


def make_matchings(
    run: ResolvedRun, *, student: nn.Module, teacher: nn.Module, mesh: Mesh | None, device: torch.device
) -> list[HiddenStateLoss | AttentionLoss]:
    """The matchings of a run; none where the config has none.

    Args:
        run: the resolved config, a distillation.
        student, teacher: the full models, on any device.
        mesh: this rank's coordinates and groups.
        device: of this rank.
    """
    section = run.config.distill
    assert section is not None
    depths = {"student": len(decoder_layers(student)), "teacher": len(decoder_layers(teacher))}
    shard = SequenceShard.of(run, mesh, device)
    made: list[HiddenStateLoss | AttentionLoss] = []
    if section.hidden_states is not None:
        layers = layer_map(HIDDEN, section.hidden_states.layers, **depths)
        made.append(HiddenStateLoss(section.hidden_states, layers, shard))
    if section.attentions is not None:
        layers = layer_map(ATTENTIONS, section.attentions.layers, **depths)
        heads = relation_heads(section.attentions, sizes_of(student))
        made.append(AttentionLoss(section.attentions, layers, heads=heads, shard=shard))
    return made


def _union(wanted: list[Wanted]) -> Wanted:
    return Wanted(
        frozenset().union(*(each.hidden for each in wanted)), frozenset().union(*(each.attention for each in wanted))
    )


class _SumOver(torch.autograd.Function):
    """Sums over a group of ranks of which each has the gradient of its own summand."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004
        summed = values.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None
