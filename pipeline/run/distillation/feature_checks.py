"""Checks of matched features that need both models, before a run starts."""

from __future__ import annotations

from typing import Any

from torch import nn

from foundation.errors import ConfigError
from pipeline.config.rules.distillation import ATTENTIONS, check_models, features_of
from pipeline.config.sections.compression import DistillSection
from pipeline.config.topology import Topology
from pipeline.engines.parallel.tensor import undivided_blocks
from pipeline.models.decoder_layers import decoder_layers

_ATTENTIONS = {"full_attention", "sliding_attention", "chunked_attention"}
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def check_feature_models(
    section: DistillSection,
    topology: Topology,
    *,
    student: nn.Module,
    teacher: nn.Module,
    last_stage: tuple[int, int],
    compiled: bool,
) -> None:
    """Refuses matchings that are impossible for two models.

    Args:
        section: the config's `distill`.
        topology: the mesh.
        student, teacher: the full models, on meta.
        last_stage: the first layer of the student's last pipeline stage, and the end of its layers.
        compiled: whether decoder layers are compiled.

    Raises:
        ConfigError: a matching is impossible; the error names the field and what works.
    """
    fields = features_of(section)
    if not fields:
        return
    for whose, model in (("student", student), ("teacher", teacher)):
        _check_layers(next(iter(fields)), whose, model)
        if section.attentions is not None:
            _check_attention(whose, model)
            _check_heads_divided(whose, model, topology.tp)
    check_models(section, sizes_of(student), sizes_of(teacher), topology, last_stage=last_stage)
    if section.attentions is not None and compiled:
        why = "queries, keys and values are recorded within a layer, and a compiled layer hands nothing out"
        raise ConfigError(ATTENTIONS, why=why, remedy="set compile.enabled to false (it is on where there is a GPU)")


def sizes_of(model: nn.Module) -> dict[str, Any]:
    """Returns depth, width and heads of a Hugging Face model, whatever its architecture calls them."""
    return {name: getattr(model.config, name, None) for name in _SIZES}


def _check_layers(field: str, whose: str, model: nn.Module) -> None:
    config: Any = model.config
    found, told = len(decoder_layers(model)), getattr(config, "num_hidden_layers", None)
    if found != told:
        why = f"the {whose} ({config.model_type}) has {told} layers by its config, and {found} could be found"
        raise ConfigError(field, why=why, remedy="remove it, or use another architecture, e.g. llama")


def _check_heads_divided(whose: str, model: nn.Module, tp: int) -> None:
    """Refuses a model of whose attention tensor-parallel ranks do not have different heads."""
    found = undivided_blocks(model, tp=tp) if tp > 1 else {}
    if found:
        block, why = next(iter(found.items()))
        why = f"{block} of the {whose} {why}, and attentions are matched with each rank's own heads"
        raise ConfigError(ATTENTIONS, why=why, remedy="use parallel.tp 1 (with ZeRO, FSDP2 or cp), or remove it")


def _check_attention(whose: str, model: nn.Module) -> None:
    """Refuses a model if the widths of its layers' queries, keys and values differ from the config's."""
    config: Any = model.config
    others = {*(getattr(config, "layer_types", None) or ())} - _ATTENTIONS
    what = None
    if getattr(config, "num_attention_heads", None) is None:
        what = "has no attention heads"
    elif others:
        what = f"has layers without attention ({', '.join(sorted(others))})"
    elif getattr(config, "kv_lora_rank", None) is not None:
        what = "has latent attention, whose keys and values differ in width"
    if what is not None:
        remedy = "match distill.hidden_states alone"
        raise ConfigError(ATTENTIONS, why=f"the {whose} ({config.model_type}) {what}", remedy=remedy)
