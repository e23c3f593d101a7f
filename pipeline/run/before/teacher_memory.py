"""The memory of a distillation's teacher per rank, before the run starts: for `headrace check`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from foundation.errors import ConfigError
from pipeline.config.rules.distillation import ATTENTIONS, HIDDEN, attention_features, layer_map, relation_heads
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.compression import AttentionsSection, HiddenStatesSection, LayerMap
from pipeline.engines.parallel.assemble import loss_chunk
from pipeline.engines.sizes.footprint import footprint_of
from pipeline.engines.sizes.memory import peak_memory
from pipeline.run.before.memory_summary import shown_bytes
from pipeline.run.before.summary import Entry
from pipeline.run.distillation.feature_checks import sizes_of
from pipeline.run.distillation.relations import SCORES, Kind
from pipeline.run.distillation.teacher import teacher_run
from pipeline.run.prepare import PreparedRun

_FP32_COPIES = 3
"""Number of fp32 copies of a chunk's logits at the divergence's peak: both log-probabilities and the terms."""
_GATHERED = 2
"""Number of layers of a sharded teacher that are gathered at a time: the running layer and the next."""
_FP32 = 4
_SCORES = {"kl": 6, "similarity": 2}
"""Number of fp32 copies, at a time, of a relation of some rows: scores and values derived from them."""


@dataclass(frozen=True)
class TeacherBytes:
    """Memory of a teacher on a rank of the last pipeline stage, in bytes.

    Attributes:
        layers: weights of the decoder layers, after tensor parallelism.
        largest: weights of the largest layer.
        rest: weights of embedding, final norm and head.
        logits: logits and their log-probabilities, for the positions that exist at a time.
        data_ranks: number of ranks over which the layers can be sharded.
    """

    layers: float
    largest: float
    rest: float
    logits: float
    data_ranks: int

    def total(self, *, sharded: bool) -> float:
        """Returns the teacher's bytes on a rank, all parts together."""
        kept = self.layers / self.data_ranks + _GATHERED * self.largest if sharded else self.layers
        return kept + self.rest + self.logits

    def least_ranks(self, room: float) -> int | None:
        """Finds the fewest data ranks on which a sharded teacher fits into `room` bytes; None if no number suffices."""
        left = room - _GATHERED * self.largest - self.rest - self.logits
        return math.ceil(self.layers / left) if left > 0 else None


def teacher_entries(prepared: PreparedRun, *, memory: int | None) -> Iterator[Entry]:
    """Yields the teacher's memory on a rank; with `memory`, refuses a teacher that does not fit beside the student.

    Args:
        prepared: the run.
        memory: bytes of a device's memory; None to refuse nothing.

    Raises:
        ConfigError: the teacher does not fit; the error names a layout in which it would.
    """
    run, section = prepared.run, prepared.run.config.distill
    if section is None or prepared.teacher is None:
        return
    found = teacher_bytes(prepared)
    if found is None:
        yield Entry("teacher", "its memory is not known: its layers are not built like Llama's", None)
        return
    sharded = section.shard_teacher and found.data_ranks > 1
    total = found.total(sharded=sharded)
    where = f", its layers sharded over {found.data_ranks} data ranks" if sharded else ""
    beside = f"{shown_bytes(total)} per rank beside the student{where}"
    values = {"bytes": round(total), "sharded": sharded, "chunk_bytes": round(found.logits)}
    yield Entry("teacher", f"{beside}; {shown_bytes(found.logits)} of it for logits at a time", values)
    matching = matching_bytes(prepared)
    if matching:
        text = f"about {shown_bytes(matching)} per rank for features of the teacher, and gradients of the student's"
        yield Entry("matching", text, {"bytes": round(matching)})
    footprint = footprint_of(run, prepared.model)
    if memory is not None and footprint is not None:
        own = peak_memory(run, footprint, pp_rank=run.rank_of_stage(-1)).total + matching
        _refuse_too_large(prepared, found, total=total, own=own, memory=memory)


def teacher_bytes(prepared: PreparedRun) -> TeacherBytes | None:
    """Computes the memory of a run's teacher; None for an architecture with unknown layers."""
    assert prepared.teacher is not None
    run, model = prepared.run, prepared.teacher.model
    alone = teacher_run(run)
    footprint = footprint_of(alone, model)
    if footprint is None:
        return None
    rank = footprint.ranks[0]
    size = next(model.parameters()).element_size()
    length = run.batch.sequence_length // run.topology.cp
    chunk = loss_chunk(run, model.config) or length
    rows = run.batch.micro * min(chunk, length)
    columns = footprint.widths.vocabulary / run.topology.tp
    logits = rows * columns * (size + _FP32_COPIES * 4)
    ranks = run.topology.dp * run.topology.cp
    return TeacherBytes(size * sum(rank.layers), size * max(rank.layers), size * rank.rest, logits, ranks)


def _refuse_too_large(prepared: PreparedRun, found: TeacherBytes, *, total: float, own: float, memory: int) -> None:
    if own + total <= memory or own > memory:  # `memory fit` reports a student that does not fit alone
        return
    section = prepared.run.config.distill
    assert section is not None
    why = f"it takes {shown_bytes(total)} per rank and the student {shown_bytes(own)}, of {shown_bytes(memory)}"
    layouts = _layouts(found, tp=prepared.run.topology.tp, room=memory - own)
    remedy = " or ".join([*layouts, "distill.logits (headrace cache-logits)"])
    raise ConfigError("distill.teacher", section.teacher, why=why, remedy=f"use {remedy}")


def _layouts(found: TeacherBytes, *, tp: int, room: float) -> Iterator[str]:
    """Yields settings that make the teacher fit into `room` bytes."""
    least = found.least_ranks(room)
    if least is not None:
        more = f" on {least} data ranks or more" if least > found.data_ranks else ""
        yield f"distill.shard_teacher true{more}"
    wider = (n for n in (2, 4, 8, 16) if n > tp)
    needed = replace(found, logits=0.0).total(sharded=False) * tp
    for n in wider:
        if needed / n + found.logits * tp / n <= room:
            yield f"parallel.tp {n}"
            return


@dataclass(frozen=True)
class _MatchingSizes:
    """Inputs of the formulas: tokens of a micro-batch on a rank, bytes per element, widths and depths."""

    run: ResolvedRun
    student: dict[str, Any]
    teacher: dict[str, Any]
    element: int

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank."""
        return self.run.batch.micro * self.run.batch.sequence_length // self.run.topology.cp

    def layers(self, field: str, given: LayerMap) -> int:
        """Returns the number of mapped layers."""
        depths = {"student": self.student["num_hidden_layers"], "teacher": self.teacher["num_hidden_layers"]}
        return len(layer_map(field, given, **depths))

    def scores(self, kind: Kind, *, heads: int) -> float:
        """Computes the bytes of a relation of some rows; each tp rank has its share of the heads or rows."""
        elements = self.tokens * self.run.batch.sequence_length * heads / self.run.topology.tp
        return _SCORES[kind] * _FP32 * min(SCORES, elements)


def matching_bytes(prepared: PreparedRun) -> float:
    """Computes the bytes of a run's matchings on a rank; 0 without matchings.

    The formulas count the tensors that exist at the end of the forward pass, beside student and teacher. These are the
    teacher's features of all mapped layers, fp32 gradients of the student's features, the student's queries, keys and
    values where activation checkpointing would have dropped them, and a relation of some rows. Measured: docs/log.md,
    Distillation.
    """
    section = prepared.run.config.distill
    if section is None or prepared.teacher is None:
        return 0.0
    models = sizes_of(prepared.model), sizes_of(prepared.teacher.model)
    sizes = _MatchingSizes(prepared.run, *models, element=next(prepared.model.parameters()).element_size())
    hidden = (0.0, 0.0) if section.hidden_states is None else _hidden_states(section.hidden_states, sizes)
    attentions = (0.0, 0.0) if section.attentions is None else _attentions(section.attentions, sizes)
    return hidden[0] + attentions[0] + max(hidden[1], attentions[1])


def _hidden_states(section: HiddenStatesSection, sizes: _MatchingSizes) -> tuple[float, float]:
    """Returns bytes that stay allocated, and bytes needed temporarily."""
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


def _attentions(section: AttentionsSection, sizes: _MatchingSizes) -> tuple[float, float]:
    tp, cp = sizes.run.topology.tp, sizes.run.topology.cp
    own, theirs = attention_features(sizes.student), attention_features(sizes.teacher)
    # without activation checkpointing, attention's backward pass keeps the student's features anyway
    recorded = sum(theirs.values())
    recorded += 0 if sizes.run.config.memory.activation_checkpointing == "none" else sum(own.values())
    gradients = (1 + cp) * sum(own[name] for name in section.relations)
    layers = sizes.layers(ATTENTIONS, section.layers)
    kept = layers * sizes.tokens * (_FP32 * gradients + sizes.element * recorded) / tp
    return kept, sizes.scores("kl", heads=relation_heads(section, sizes.student))
