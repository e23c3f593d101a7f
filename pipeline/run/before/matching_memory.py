"""The memory of matching hidden states and attention relations per rank, before the run starts: for `headrace check`.

Formulas of what exists at the end of the forward pass, beside student and teacher: the teacher's features of all mapped
layers, gradients of the student's in fp32, the student's queries, keys and values where activation checkpointing would
not have kept them, and a relation of some rows. Measured: docs/log.md, Distillation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.config.rules.distillation import ATTENTIONS, HIDDEN, attention_features, layer_map, relation_heads
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.compression import AttentionsSection, HiddenStatesSection, LayerMap
from pipeline.run.distillation.feature_checks import sizes_of
from pipeline.run.distillation.relations import SCORES, Kind
from pipeline.run.prepare import PreparedRun

_FP32 = 4
_SCORES = {"kl": 6, "similarity": 2}
"""Fp32 copies of a relation of some rows that exist at a time: scores and values made of them."""


@dataclass(frozen=True)
class _Sizes:
    """Inputs of the formulas: tokens of a micro-batch on a rank, bytes of an element, widths and depths."""

    run: ResolvedRun
    student: dict[str, Any]
    teacher: dict[str, Any]
    element: int

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank."""
        return self.run.batch.micro * self.run.batch.sequence_length // self.run.topology.cp

    def layers(self, field: str, given: LayerMap) -> int:
        """Number of mapped layers."""
        depths = {"student": self.student["num_hidden_layers"], "teacher": self.teacher["num_hidden_layers"]}
        return len(layer_map(field, given, **depths))

    def scores(self, kind: Kind, *, heads: int) -> float:
        """Bytes of a relation of some rows; each tp rank has its share of the heads, or of the rows."""
        elements = self.tokens * self.run.batch.sequence_length * heads / self.run.topology.tp
        return _SCORES[kind] * _FP32 * min(SCORES, elements)


def matching_bytes(prepared: PreparedRun) -> float:
    """Bytes that the matchings of a run take on a rank; 0 without any."""
    section = prepared.run.config.distill
    if section is None or prepared.teacher is None:
        return 0.0
    models = sizes_of(prepared.model), sizes_of(prepared.teacher.model)
    sizes = _Sizes(prepared.run, *models, element=next(prepared.model.parameters()).element_size())
    hidden = (0.0, 0.0) if section.hidden_states is None else _hidden_states(section.hidden_states, sizes)
    attentions = (0.0, 0.0) if section.attentions is None else _attentions(section.attentions, sizes)
    return hidden[0] + attentions[0] + max(hidden[1], attentions[1])


def _hidden_states(section: HiddenStatesSection, sizes: _Sizes) -> tuple[float, float]:
    """Bytes that stay allocated, and bytes needed for a moment."""
    own, theirs = sizes.student["hidden_size"], sizes.teacher["hidden_size"]
    tp, cp = sizes.run.topology.tp, sizes.run.topology.cp
    copies = 0 if sizes.element == _FP32 else 1  # fp32 copies of hidden states in 16 bits
    kept: float = {
        "similarity": (1 / tp + cp + copies / tp) * own,
        "mse": own / tp,
        "cosine": (theirs + copies * own) / tp,
    }[section.loss]
    layers = sizes.layers(HIDDEN, section.layers)
    total = layers * sizes.tokens * (_FP32 * kept + sizes.element * theirs / tp)
    if section.loss != "similarity":
        return total, 0.0
    return total, sizes.scores("similarity", heads=1) + _FP32 * sizes.tokens * (own + theirs) * cp


def _attentions(section: AttentionsSection, sizes: _Sizes) -> tuple[float, float]:
    tp, cp = sizes.run.topology.tp, sizes.run.topology.cp
    own, theirs = attention_features(sizes.student), attention_features(sizes.teacher)
    # without activation checkpointing the backward pass of attention keeps the student's anyway
    recorded = sum(theirs.values())
    recorded += 0 if sizes.run.config.memory.activation_checkpointing == "none" else sum(own.values())
    gradients = (1 + cp) * sum(own[name] for name in section.relations)
    layers = sizes.layers(ATTENTIONS, section.layers)
    kept = layers * sizes.tokens * (_FP32 * gradients + sizes.element * recorded) / tp
    return kept, sizes.scores("kl", heads=relation_heads(section, sizes.student))
