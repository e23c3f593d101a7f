"""A distillation that also matches hidden states and attention relations: the objective of this run.

loss = distillation loss + w_h H + w_a A, summed over target tokens; `matching` defines H and A. The teacher's features
are recorded in the forward pass that gives its targets. In a pipeline the last stage has the teacher, so only the
student's layers on that stage can be matched.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.rules.distillation import ATTENTIONS, HIDDEN, layer_map, relation_heads
from pipeline.config.sections.compression import DistillSection
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.objective import Loss
from pipeline.engines.parallel.features import Features, WantedFeatures, recording
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard
from pipeline.models.decoder_layers import decoder_layers
from pipeline.run.distillation.feature_checks import sizes_of
from pipeline.run.distillation.matching import AttentionLoss, HiddenStateLoss, SequenceShard
from pipeline.run.distillation.objective import Distillation
from pipeline.run.distillation.teacher import Teacher


class FeatureDistillation:
    """A distillation with matching; an `engines.objective.Objective` and a `parallel.features.FeatureLoss`.

    Args:
        distillation: the loss of the logits, from the same teacher.
        teacher: the teacher in memory; its features are recorded in the forward pass that gives its targets.
        matchings: losses of matched features, one or two.
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
        """Returns `Distillation.extra_targets`, and keeps the teacher's features for `matched`."""
        with recording(self._teacher.decoder, self._wanted_of_teacher) as self._features:
            return self._distillation.extra_targets(batch)

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        """Computes the loss of the logits alone, like `Distillation`."""
        return self._distillation(logits, labels, *extra_targets, vocabulary=vocabulary)

    def with_gradient(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> tuple[Loss, Tensor]:
        """Implements `Objective.with_gradient`, for the logits alone."""
        return self._distillation.with_gradient(logits, labels, *extra_targets, vocabulary=vocabulary)

    def matched(self, features: Features, batch: MicroBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Implements `FeatureLoss.matched`: the loss is equal on all tp ranks, the gradient is of this rank's part."""
        teacher, self._features = self._features, None
        assert teacher is not None, "the teacher has not been run on this batch"
        own = torch.stack([each(features, teacher, batch) for each in self._matchings])
        sums: Tensor = own if self._tp is None else _SumOver.apply(own, self._tp)
        weights = sums.new_tensor([each.weight for each in self._matchings])
        return sums @ weights, tuple(sums.detach().unbind())


def make_matchings(
    section: DistillSection, shard: SequenceShard, *, student: nn.Module, teacher: nn.Module
) -> list[HiddenStateLoss | AttentionLoss]:
    """Makes the matchings of a run; returns none if the config has none.

    Args:
        section: the config's `distill`.
        shard: this rank's positions.
        student, teacher: the full models, on any device.
    """
    depths = {"student": len(decoder_layers(student)), "teacher": len(decoder_layers(teacher))}
    made: list[HiddenStateLoss | AttentionLoss] = []
    if section.hidden_states is not None:
        layers = layer_map(HIDDEN, section.hidden_states.layers, **depths)
        made.append(HiddenStateLoss(section.hidden_states, layers, shard))
    if section.attentions is not None:
        layers = layer_map(ATTENTIONS, section.attentions.layers, **depths)
        heads = relation_heads(section.attentions, sizes_of(student))
        made.append(AttentionLoss(section.attentions, layers, heads=heads, shard=shard))
    return made


def _union(wanted: list[WantedFeatures]) -> WantedFeatures:
    return WantedFeatures(
        frozenset().union(*(each.hidden for each in wanted)), frozenset().union(*(each.attention for each in wanted))
    )


class _SumOver(torch.autograd.Function):
    """Sums over a group of ranks; each rank gets the gradient of its own summand."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004
        summed = values.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None
