"""Compares a checkpoint of another trainer with the model and the optimizer of a config, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from headrace.base.errors import CheckpointError
from pipeline.checkpoint.importing.source import SourceCheckpoint, TargetModel
from pipeline.checkpoint.named_state import buffer_key, moment_key, weight_key
from pipeline.checkpoint.write.streamed import LazyTensor
from pipeline.config.sections.optimizers import OptimizerKind

_SHOWN = 8
_COMPUTED_WITH = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "tie_word_embeddings",
    "head_dim",
    "hidden_act",
    "activation_function",
    "rms_norm_eps",
    "layer_norm_epsilon",
    "rope_theta",
    "rope_parameters",
    "partial_rotary_factor",
    "sliding_window",
    "num_experts_per_tok",
    "norm_topk_prob",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
)
"""Fields of a Hugging Face config that no shape shows, and without which the same weights are another model."""


def matched_state(
    source: SourceCheckpoint, wanted: TargetModel, kind_of: Callable[[str], OptimizerKind]
) -> dict[str, LazyTensor]:
    """The tensors of the checkpoint under the keys of `named_state`, in fp32; buffers in their dtype.

    Args:
        source: the checkpoint.
        wanted: of the config's model.
        kind_of: the optimizer's kind for a parameter.

    Raises:
        CheckpointError: a tensor is missing, or has another shape; its optimizer keeps other states.
    """
    weights = _renamed(source.weights, wanted)
    shapes = {**wanted.parameters, **wanted.buffers}
    # a buffer that it lacks gets its first value, as where a run has none
    needed = {name: shape for name, shape in shapes.items() if name in wanted.parameters or name in weights}
    if lines := _differences(weights, needed):
        raise CheckpointError(
            f"{source.path} holds another model than the config's:\n{_listed(lines)}\n"
            f"  try: the model that it is of, as model.config, or model.path with its config.json"
        )
    state = {weight_key(name): weights[name].to(torch.float32) for name in wanted.parameters}
    for name in wanted.parameters:
        for moment in kind_of(name).states:
            tensor = _renamed(source.states.get(moment, {}), wanted).get(name)
            if tensor is None:
                raise _other_optimizer(source, name, kind_of(name))
            if tensor.shape != wanted.parameters[name]:
                why = f"{moment} of {name} has shape {tensor.shape}, and its weight {wanted.parameters[name]}"
                raise CheckpointError(f"{source.path}: {why}\n  try: the checkpoint of another step")
            state[moment_key(moment, name)] = tensor.to(torch.float32)
    return state | {buffer_key(name): weights[name] for name in wanted.buffers if name in weights}


def check_config(source: SourceCheckpoint, wanted: TargetModel) -> None:
    """Compares fields of both Hugging Face configs that no shape of a tensor shows.

    Raises:
        CheckpointError: some differ.
    """
    if source.hf_config is None:
        return
    theirs, resolved = source.hf_config, wanted.hf_config
    both = [key for key in _COMPUTED_WITH if key in theirs and key in resolved]
    lines = [
        f"{key}: checkpoint {theirs[key]!r}, config {resolved[key]!r}" for key in both if theirs[key] != resolved[key]
    ]
    if lines:
        raise CheckpointError(
            f"{source.path} is of a model that computes otherwise than the config's:\n{_listed(lines)}\n"
            f"  try: these values in model.config, or model.path with its config.json"
        )


def _renamed(tensors: Mapping[str, LazyTensor], wanted: TargetModel) -> dict[str, LazyTensor]:
    """Under the names of the model: of a tied parameter the checkpoint may have either name, or both."""
    owners = {name: tensor for name, tensor in tensors.items() if name not in wanted.aliases}
    return {wanted.aliases[name]: tensor for name, tensor in tensors.items() if name in wanted.aliases} | owners


def _differences(found: Mapping[str, LazyTensor], needed: Mapping[str, tuple[int, ...]]) -> list[str]:
    lines = []
    for name in dict.fromkeys([*needed, *found]):
        here, there = needed.get(name), found[name].shape if name in found else None
        if here != there:
            lines.append(f"{name}: checkpoint {there or 'without it'}, config {here or 'without it'}")
    return lines


def _listed(lines: Sequence[str]) -> str:
    more = [f"    and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([*(f"    {line}" for line in lines[:_SHOWN]), *more])


def _other_optimizer(source: SourceCheckpoint, name: str, kind: OptimizerKind) -> CheckpointError:
    has = ", ".join(moment for moment in source.states if name in source.states[moment]) or "none"
    return CheckpointError(
        f"{source.path} has of {name} the optimizer states: {has}; the config's {kind.name} keeps"
        f" {', '.join(kind.states)}\n"
        f"  try: the optimizer.type that it was trained with; a run that has resumed may change it by run.allow_change"
    )
