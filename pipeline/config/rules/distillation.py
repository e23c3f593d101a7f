"""Rules of a distillation, and its layer map: the layers whose hidden states and attentions are matched. No torch.

Layers are counted from 0. Sources of the layer maps: uniform, Jiao et al. 2020, TinyBERT (arXiv:1909.10351), section
3.1; only the last layers, Wang et al. 2020, MiniLM (arXiv:2002.10957), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from foundation.errors import ConfigError
from pipeline.config.sections.compression import AttentionsSection, DistillSection, HiddenStatesSection, LayerMap
from pipeline.config.sections.data import DataSection
from pipeline.config.topology import Topology

HIDDEN, ATTENTIONS = "distill.hidden_states", "distill.attentions"


def features_of(section: DistillSection) -> dict[str, HiddenStatesSection | AttentionsSection]:
    """Returns field -> section of every matching that is on."""
    both: dict[str, HiddenStatesSection | AttentionsSection | None] = {
        HIDDEN: section.hidden_states,
        ATTENTIONS: section.attentions,
    }
    return {field: value for field, value in both.items() if value is not None}


def check_features(distill: DistillSection | None, *, attn_implementation: str, engine: str, compiled: bool) -> None:
    """Refuses matchings that are impossible for any model: without a teacher in memory, or with other attention.

    Raises:
        ConfigError: a matching is impossible; the error names the field and what works.
    """
    if distill is None:
        return
    for field in features_of(distill):
        if distill.logits is not None:
            why = "cached logits hold the teacher's output, not its hidden states and attentions"
            raise ConfigError(field, why=why, remedy="use distill.teacher without distill.logits, or remove it")
    if distill.attentions is None:
        return
    relations = distill.attentions.relations
    if len({*relations}) < len(relations):
        why = "one of them is named twice, and would count as two"
        raise ConfigError(f"{ATTENTIONS}.relations", list(relations), why=why, remedy="name each once")
    own = "queries, keys and values are recorded by headrace's own attention"
    if attn_implementation != "sdpa":
        why = f"{own}, and model.attn_implementation is {attn_implementation}"
        raise ConfigError(ATTENTIONS, why=why, remedy="set model.attn_implementation to sdpa")
    if engine == "reference":
        why = f"{own}, and engine reference runs Hugging Face's"
        raise ConfigError(ATTENTIONS, why=why, remedy="use engine torch or deepspeed")
    if compiled:
        why = f"{own} within a layer, and a compiled layer is one graph that hands nothing out"
        raise ConfigError(ATTENTIONS, why=why, remedy="set compile.enabled to false")


def layer_map(field: str, given: LayerMap, *, student: int, teacher: int) -> dict[int, int]:
    """Maps the student's layers to the teacher's.

    Args:
        field: name of the section, for the message.
        given: the config's layer map. "uniform" maps layer i of n to layer ceil((i + 1) N / n) - 1 of N: both are at
            the same fraction of the depth, and the last layers are mapped to each other.
        student, teacher: number of decoder layers, n and N.

    Raises:
        ConfigError: a layer does not exist, or the map is empty.
    """
    if given == "last":
        return {student - 1: teacher - 1}
    if given == "uniform":
        return {layer: -(-(layer + 1) * teacher // student) - 1 for layer in range(student)}
    assert isinstance(given, dict)
    if not given:
        raise ConfigError(f"{field}.layers", why="it maps no layer", remedy='use "uniform", "last" or e.g. {"0": 1}')
    made: dict[int, int] = {}
    for own, theirs in given.items():
        number = int(own) if own.isdecimal() else None
        if number is None or number >= student:
            why = f"the student has {student} layers, 0 to {student - 1}"
            raise ConfigError(f"{field}.layers", own, why=why, remedy=f'name one of them, e.g. "{student - 1}"')
        if theirs >= teacher:
            why = f"the teacher has {teacher} layers, 0 to {teacher - 1}"
            raise ConfigError(f"{field}.layers", theirs, why=why, remedy=f'use at most {{"{own}": {teacher - 1}}}')
        if number in made:
            raise ConfigError(f"{field}.layers", own, why=f"layer {number} is named twice", remedy="name it once")
        made[number] = theirs
    return dict(sorted(made.items()))


def check_models(
    section: DistillSection,
    student: Mapping[str, Any],
    teacher: Mapping[str, Any],
    topology: Topology,
    *,
    last_stage: tuple[int, int],
) -> None:
    """Refuses a layer map, a loss or relation heads that do not fit the two models.

    Args:
        section: the config's `distill`.
        student, teacher: Hugging Face configs of the two models.
        topology: the mesh.
        last_stage: (first, end) of the student's layers on the last pipeline stage.

    Raises:
        ConfigError: something does not fit; the error names the field and what works.
    """
    for field, matching in features_of(section).items():
        depths = {"student": student["num_hidden_layers"], "teacher": teacher["num_hidden_layers"]}
        earlier = [own for own in layer_map(field, matching.layers, **depths) if own < last_stage[0]]
        if earlier:
            first, last = last_stage[0], last_stage[1] - 1
            why = f"the teacher is on the last of {topology.pp} pipeline stages, which has the student's layers {first}"
            why += f" to {last}, and layer {earlier[0]} is on another"
            raise ConfigError(f"{field}.layers", why=why, remedy=f'map layers from {first} on, e.g. "last", or pp 1')
    hidden = section.hidden_states
    widths = student["hidden_size"], teacher["hidden_size"]
    if hidden is not None and hidden.loss != "similarity" and widths[0] != widths[1]:
        why = f"the student's hidden_size is {widths[0]}, the teacher's {widths[1]}"
        raise ConfigError(f"{HIDDEN}.loss", hidden.loss, why=why, remedy="use similarity, which needs no equal widths")
    if section.attentions is not None:
        _check_relation_heads(section.attentions, student, teacher, topology)


def relation_heads(section: AttentionsSection, student: Mapping[str, Any]) -> int:
    """Returns the number of relation heads of both models: as configured, or the student's attention heads."""
    heads: int = section.relation_heads or student["num_attention_heads"]
    return heads


def attention_features(model: Mapping[str, Any]) -> dict[str, int]:
    """Returns the features of a token's queries, keys and values, over all heads, from a Hugging Face config."""
    heads = model["num_attention_heads"]
    size = model.get("head_dim") or model["hidden_size"] // heads
    keys = (model.get("num_key_value_heads") or heads) * size
    return {"query": heads * size, "key": keys, "value": keys}


def _check_relation_heads(
    section: AttentionsSection, student: Mapping[str, Any], teacher: Mapping[str, Any], topology: Topology
) -> None:
    heads, field = relation_heads(section, student), f"{ATTENTIONS}.relation_heads"
    both = {"student": attention_features(student), "teacher": attention_features(teacher)}
    common = gcd(*(made[name] for made in both.values() for name in section.relations))
    fitting = [n for n in range(1, common + 1) if common % n == 0 and n % topology.tp == 0]
    if heads in fitting:
        return
    why = f"it does not divide the features of both models' {', '.join(section.relations)} ({_shown(both)})"
    if heads % topology.tp:
        why = f"parallel.tp {topology.tp} does not divide it"
    if not fitting:
        raise ConfigError(field, heads, why=why, remedy="use a smaller parallel.tp, or remove distill.attentions")
    near = min(fitting, key=lambda n: abs(n - heads))
    raise ConfigError(field, heads, why=why, remedy=f"use {near}")


def _shown(both: Mapping[str, Mapping[str, int]]) -> str:
    return "; ".join(f"{name}: {made['query']}, {made['key']}, {made['value']}" for name, made in both.items())


def check_distillation(section: DistillSection | None, data: DataSection) -> None:
    """Refuses a distillation without a teacher, and cached logits of samples that differ from run to run.

    Raises:
        ConfigError: the section is invalid; the error names the field.
    """
    if section is None:
        return
    if section.teacher is None and section.logits is None:
        why = "there is neither a teacher nor its cached logits"
        raise ConfigError("distill.teacher", why=why, remedy='e.g. "teacher": "out/models/teacher"')
    if section.logits is not None and data.fim is not None:
        why = "fill-in-the-middle rearranges a sample differently in every run, and cached logits are of one order"
        raise ConfigError("distill.logits", section.logits, why=why, remedy="use distill.teacher, or remove data.fim")
    if section.logits is not None and section.on_policy is not None:
        why = "cached logits cover the data's tokens, and the student's samples are not known before the training"
        raise ConfigError("distill.on_policy", why=why, remedy="use distill.teacher without distill.logits")
    if section.logits is not None and section.shard_teacher:
        why = "with cached logits no teacher is in memory"
        raise ConfigError("distill.shard_teacher", True, why=why, remedy="leave it out")
