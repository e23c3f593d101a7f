"""CompleteP (Dey et al. 2025, arXiv:2505.01618, table 1, alpha = 1) as factors per parameter.

In width, CompleteP is muP (Yang et al. 2022, arXiv:2203.03466, tables 3 and 8). The published form has two multipliers
in the forward pass: 1 / m_L on every residual branch and 1 / m_N on the logits. Here they are folded into the parameter
that they multiply. With a weight w' = a w instead of a multiplier a, Adam makes the same steps if the initial standard
deviation and the learning rate are multiplied by a, and epsilon and weight decay divided by a (the abc-symmetry of Yang
and Littwin 2023, arXiv:2308.01814). So the forward pass and exported models are the architecture's own.
docs/decisions/0033-completep.md has the derivation.

Muon's update of a hidden matrix is orthogonal and does not grow with the gradient, so multipliers are folded as with
Adam. Its learning rate follows from the update that a layer needs: its spectral norm is proportional to sqrt(outputs /
inputs) (Yang, Simon and Bernstein 2023, arXiv:2310.17813, condition 1).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from foundation.errors import ConfigError
from pipeline.config.sections.optimizers import OptimizerSection
from pipeline.config.sections.parametrization import BaseModelSection
from pipeline.config.sections.run import ModelSection
from pipeline.engines.optim.groups import UpdateScale
from pipeline.engines.optim.newton_schulz import update_scale
from pipeline.engines.parametrization.kinds import ParameterKind, kind_of
from pipeline.models.construction.meta import build_meta
from pipeline.models.hidden_matrices import MatrixForm, hidden_matrices


@dataclass(frozen=True)
class Scale:
    """Factors of one parameter relative to the base model's parameter of the same name.

    Attributes:
        init: factor on the initial values.
        lr: factor on the learning rate.
        eps: factor on AdamW's epsilon.
        weight_decay: factor on the weight decay, if any.
    """

    init: float = 1.0
    lr: float = 1.0
    eps: float = 1.0
    weight_decay: float = 1.0

    def multiplied(self, multiplier: float) -> Scale:
        """Folds a multiplier of the forward pass into the parameter; returns the scale for the same training."""
        a = multiplier
        return Scale(self.init * a, self.lr * a, self.eps / a, self.weight_decay / a)


def rule(
    kind: ParameterKind, *, fan_in: float, width: float, depth: float, tied: bool, orthogonal: float | None = None
) -> Scale:
    """Returns the factors of a kind of parameter.

    Args:
        kind: the parameter's kind.
        fan_in: columns of the matrix relative to the base model's; 1 for kinds that are not hidden weights.
        width: m_N, the hidden size relative to the base model's.
        depth: m_L, the decoder layers relative to the base model's.
        tied: whether the head is the embedding; then the final norm carries the multiplier of the logits.
        orthogonal: factor on the learning rate of a matrix that Muon updates; None for other parameters.
    """
    outside, inside = 1 / width, 1 / (width * depth)  # epsilon: gradients are smaller by this factor
    rate = 1 / fan_in if orthogonal is None else orthogonal
    hidden = Scale(init=1 / math.sqrt(fan_in), lr=rate, eps=inside, weight_decay=1 / rate)
    vector = Scale(eps=inside)
    if kind is ParameterKind.HIDDEN:
        return hidden
    if kind is ParameterKind.BRANCH_OUTPUT:
        return hidden.multiplied(1 / depth)
    if kind is ParameterKind.BLOCK_VECTOR:
        return vector
    if kind is ParameterKind.BRANCH_BIAS:
        return vector.multiplied(1 / depth)
    plain = Scale(eps=outside)
    carries_logits = kind is ParameterKind.HEAD or (kind is ParameterKind.FINAL_NORM and tied)
    return plain.multiplied(1 / width) if carries_logits else plain


@dataclass(frozen=True)
class Parametrization:
    """CompleteP for one model.

    Attributes:
        base: the base model, on meta.
        width: m_N.
        depth: m_L.
        kinds: Hugging Face name -> kind.
        scales: Hugging Face name -> factors, of every parameter.
    """

    base: nn.Module
    width: float
    depth: float
    kinds: Mapping[str, ParameterKind]
    scales: Mapping[str, Scale]

    def update_scale(self, name: str, *, decayed: bool) -> UpdateScale:
        """Returns the factors on the optimizer's hyperparameters for a parameter."""
        scale = self.scales[name]
        return UpdateScale(weight_decay=scale.weight_decay if decayed else 0.0, lr=scale.lr, eps=scale.eps)


def find_parametrization(
    section: ModelSection, model: nn.Module, optimizer: OptimizerSection | None = None
) -> Parametrization | None:
    """Finds the parametrization of a model; None for the standard parametrization.

    Args:
        section: the config's `model`.
        model: the full model, on meta.
        optimizer: the config's `optimizer`, on which learning rates depend, but not initial values.

    Raises:
        ConfigError: the architecture has no rules, or the base sizes do not fit it.
    """
    if section.parametrization == "standard":
        return None
    config = model.config
    assert isinstance(config, PretrainedConfig)
    kinds = {name: kind_of(config.model_type, name) for name, _ in model.named_parameters()}
    base = build_base(section, config)
    width = config.hidden_size / base.config.hidden_size  # type: ignore[union-attr]
    depth = config.num_hidden_layers / base.config.num_hidden_layers  # type: ignore[union-attr]
    tied = ParameterKind.HEAD not in kinds.values()
    rates = {} if optimizer is None or optimizer.params.adjust_lr is None else _rates(model, base, optimizer)
    shared: dict[str, Any] = {"width": width, "depth": depth, "tied": tied}
    scales = {
        name: rule(kind, fan_in=_fan_in_ratio(name, kind, model, base), orthogonal=rates.get(name), **shared)
        for name, kind in kinds.items()
    }
    return Parametrization(base, width, depth, kinds, scales)


def _rates(model: nn.Module, base: nn.Module, muon: OptimizerSection) -> dict[str, float]:
    """Returns the factor on Muon's learning rate for every hidden matrix, by name."""
    in_base = hidden_matrices(base)
    return {
        name: _needed(form, muon) / _needed(in_base[base_name(name)], muon)
        for name, form in hidden_matrices(model).items()
    }


def _needed(form: MatrixForm, muon: OptimizerSection) -> float:
    """Returns the learning rate at which an update has the spectral norm sqrt(outputs / inputs)."""
    [(outputs, inputs)] = {*form.matrices}  # in all families with rules, fused matrices have equal shapes
    return math.sqrt(outputs / inputs) / update_scale(outputs, inputs, rule=str(muon.params.adjust_lr))


def _fan_in_ratio(name: str, kind: ParameterKind, model: nn.Module, base: nn.Module) -> float:
    if kind not in (ParameterKind.HIDDEN, ParameterKind.BRANCH_OUTPUT):
        return 1.0
    return _fan_in(model, name) / _fan_in(base, base_name(name))


def _fan_in(model: nn.Module, name: str) -> int:
    owner_name, _, key = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if not isinstance(owner, nn.Linear | Conv1D):
        why = f"{name} is the weight of a {type(owner).__name__}, whose inputs are not known"
        raise ConfigError("model.parametrization", "completep", why=why, remedy="use the standard parametrization")
    shape = owner.get_parameter(key).shape
    return int(shape[0] if isinstance(owner, Conv1D) else shape[1])


def base_name(name: str) -> str:
    """Returns the corresponding parameter's name in the base model; for all layers, that of its layer 0."""
    return ".".join("0" if part.isdigit() else part for part in name.split("."))


def build_base(section: ModelSection, config: PretrainedConfig) -> nn.Module:
    """Builds the base model on meta.

    Args:
        section: the config's `model`, with `base`.
        config: Hugging Face config of the model that is trained.

    Raises:
        ConfigError: the architecture lacks a given size, or the head size or query heads per key/value head differ from
            the model's.
    """
    assert section.base is not None
    base = _base_config(section.base, config)
    _check_heads(section, base, config)
    return build_meta(base, dtype=torch.float32, attn_implementation="eager")


def _base_config(sizes: BaseModelSection, config: PretrainedConfig) -> PretrainedConfig:
    base = copy.deepcopy(config)
    for key, value in sizes.model_dump(exclude_none=True).items():
        if key == "intermediate_size" and hasattr(base, "n_inner"):  # GPT-2's name, but not an alias
            base.n_inner = value
            continue
        if not hasattr(base, key):
            why = f"{config.model_type} has no such size"
            raise ConfigError(f"model.base.{key}", value, why=why, remedy="remove it")
        setattr(base, key, value)
    layers = base.num_hidden_layers
    kinds: Any = getattr(base, "layer_types", None)
    if kinds:
        base.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
    return base


def _check_heads(section: ModelSection, base: PretrainedConfig, config: PretrainedConfig) -> None:
    """Refuses a head size or sharing of key/value heads other than the model's: only the number of heads may grow."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    free = bool(section.config and section.config.get("head_dim"))  # given, not a quotient of the hidden size
    if not free and base.hidden_size != size * base.num_attention_heads:
        why = f"at hidden_size {base.hidden_size} heads would not have {size} dimensions, as the model's have"
        near = max(base.hidden_size // size, 1)
        remedy = f"use {near} heads" + ("" if near * size == base.hidden_size else f" and hidden_size {near * size}")
        raise ConfigError("model.base.num_attention_heads", base.num_attention_heads, why=why, remedy=remedy)
    base_shared, shared = (_queries_per_key(each) for each in (base, config))
    if base_shared != shared:
        why = f"{base_shared:g} query heads share a key/value head, and {shared:g} in the model"
        near = max(round(base.num_attention_heads / shared), 1)
        remedy = f"use {near} key/value heads" if near * shared == base.num_attention_heads else "choose other heads"
        raise ConfigError("model.base.num_key_value_heads", base.num_key_value_heads, why=why, remedy=remedy)


def _queries_per_key(config: PretrainedConfig) -> float:
    return float(
        config.num_attention_heads / (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    )
