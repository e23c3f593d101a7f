"""Compares a checkpoint of another trainer with the model and the optimizer of a config, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from foundation.errors import CheckpointError
from pipeline.checkpoint.importing.source import SourceCheckpoint, TargetModel
from pipeline.checkpoint.named_state import buffer_key, moment_key, weight_key
from pipeline.checkpoint.write.streamed import LazyTensor
from pipeline.config.sections.optimizers import OptimizerKind
from pipeline.models.construction.extra_tensors import COMPUTED
from pipeline.models.construction.stored_names import TensorGroup, groups_of_files

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
"""Fields of a Hugging Face config that affect no shape, but change what a model computes with its weights."""


def matched_state(
    source: SourceCheckpoint, wanted: TargetModel, kind_of: Callable[[str], OptimizerKind]
) -> dict[str, LazyTensor]:
    """Renames the checkpoint's tensors to keys of `named_state`: weights and states in fp32, buffers in their dtype.

    Args:
        source: the checkpoint.
        wanted: the model of the config.
        kind_of: function from a parameter's name to its kind of optimizer.

    Raises:
        CheckpointError: a tensor is missing, has another shape or does not belong to the run, or the optimizers' states
            differ.
    """
    shapes = {**wanted.parameters, **wanted.buffers}
    every = _renamed(source.weights, wanted, source)
    weights = {name: tensor for name, tensor in every.items() if name in shapes or not COMPUTED.search(name)}
    states = {moment: _renamed(tensors, wanted, source) for moment, tensors in source.states.items()}
    # a buffer that the checkpoint lacks keeps its initial value
    needed = {name: shape for name, shape in shapes.items() if name in wanted.parameters or name in weights}
    if lines := _differences({**_without_weight(states, needed), **weights}, needed):
        raise CheckpointError(
            f"{source.path} holds another model than the config's:\n{_listed(lines)}\n"
            f"  try: its own model as model.config, or model.path with its config.json"
        )
    state = {weight_key(name): weights[name].to(torch.float32) for name in wanted.parameters}
    for name in wanted.parameters:
        if {*kind_of(name).states} != {moment for moment, tensors in states.items() if name in tensors}:
            raise _other_optimizer(source, states, name, kind_of(name))
        for moment in kind_of(name).states:
            tensor = states[moment][name]
            if tensor.shape != wanted.parameters[name]:
                why = f"{moment} of {name} has shape {tensor.shape}, and its weight {wanted.parameters[name]}"
                raise CheckpointError(f"{source.path}: {why}\n  try: the checkpoint of another step")
            state[moment_key(moment, name)] = tensor.to(torch.float32)
    return state | {buffer_key(name): weights[name] for name in wanted.buffers if name in weights}


def _without_weight(
    states: Mapping[str, Mapping[str, LazyTensor]], needed: Mapping[str, tuple[int, ...]]
) -> dict[str, LazyTensor]:
    """States of parameters that the model does not have."""
    return {name: tensor for tensors in states.values() for name, tensor in tensors.items() if name not in needed}


def check_config(source: SourceCheckpoint, wanted: TargetModel) -> None:
    """Compares fields of both Hugging Face configs that affect no tensor's shape.

    Raises:
        CheckpointError: some fields differ.
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
            f"{source.path} was trained with another model than the config's; these keys differ:\n{_listed(lines)}\n"
            f"  try: these values in model.config, or model.path with its config.json"
        )


def _renamed(tensors: Mapping[str, LazyTensor], wanted: TargetModel, source: SourceCheckpoint) -> dict[str, LazyTensor]:
    """Renames tensors as in the model; the checkpoint may have either name of a tied parameter, or both.

    Raises:
        CheckpointError: the checkpoint has both names, with different values.
    """
    tensors = _fused(tensors, wanted)
    found = {name: tensor for name, tensor in tensors.items() if name not in wanted.aliases}
    for alias, name in wanted.aliases.items():
        if alias in tensors and not _same(found.setdefault(name, tensors[alias]), tensors[alias]):
            why = f"the config ties {alias} to {name}, and the checkpoint has trained both: they differ"
            raise CheckpointError(f'{source.path}: {why}\n  try: "tie_word_embeddings": false in model.config')
    return found


def _same(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether two tensors have equal values when compared in the coarser of their dtypes."""
    if one is other or one.shape != other.shape:
        return one is other
    dtype = min((one.dtype, other.dtype), key=lambda each: each.itemsize)
    return torch.equal(one.read().to(dtype), other.read().to(dtype))


def _fused(tensors: Mapping[str, LazyTensor], wanted: TargetModel) -> Mapping[str, LazyTensor]:
    """Stacks experts as in the model, if the checkpoint has one tensor per expert, like model folders."""
    known = {*wanted.parameters, *wanted.buffers, *wanted.aliases}
    if tensors.keys() <= known:
        return tensors
    found: dict[str, LazyTensor] = {}
    for group in groups_of_files(wanted.model, tensors, known):
        try:
            shapes = group.convert({n: torch.empty(tensors[n].shape, device="meta") for n in group.names}, wanted.model)
        except (RuntimeError, ValueError, IndexError):
            shapes = {}
        parts = {name: tensors[name] for name in group.names}
        if not shapes or not shapes.keys() <= known:  # no part of the model: refused under its own name
            found |= parts
            continue
        dtype = next(iter(parts.values())).dtype
        for name, meta in shapes.items():
            found[name] = LazyTensor(tuple(meta.shape), dtype, partial(_converted, group, parts, wanted, name))
    return found


def _converted(group: TensorGroup, parts: Mapping[str, LazyTensor], wanted: TargetModel, name: str) -> Tensor:
    return group.convert({each: tensor.read() for each, tensor in parts.items()}, wanted.model)[name]


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


def _other_optimizer(
    source: SourceCheckpoint, states: Mapping[str, Mapping[str, LazyTensor]], name: str, kind: OptimizerKind
) -> CheckpointError:
    has = ", ".join(moment for moment in states if name in states[moment]) or "none"
    return CheckpointError(
        f"{source.path} has these optimizer states of {name}: {has}; the config's {kind.name} keeps"
        f" {', '.join(kind.states) or 'none'}\n"
        "  try: the optimizer.type that it was trained with; a run that has resumed may change it by run.allow_change."
        " For an optimizer that is not offered (amsgrad), take the weights alone, as model.path"
    )
