"""Pre-flight check of QK-Clip: scaling a head's weights has to scale its attention logits, and nothing else.

Known reasons for refusal are checked first. Then a tiny model of the architecture is tried: a factor on a head's rows
(`models.query_key_rows`) has to be exactly a factor on the head's logits, for every factor. This fails if queries or
keys are normalized, clamped or mixed after their projection. The check takes a fraction of a second, on the CPU.

Shapes: H heads, K key heads, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from foundation.errors import ConfigError
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.parallel.architecture_trial import TOLERANCE, random_model
from pipeline.engines.parallel.decoder import Decoder, DecoderLayout, parameter_owners
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.attention_adapters import unmeasured_logits
from pipeline.models.hf_config import one_line
from pipeline.models.query_key_rows import AttentionHeads, attention_heads, norms_of_heads
from pipeline.models.resize.shrink import shrink

_V, _T = 32, 16
_FACTORS = (0.25, 64.0)
"""Factors to try; the large one would exceed a bound on queries and keys."""


def check_qk_clip(run: ResolvedRun, model: nn.Module) -> None:
    """Refuses QK-Clip for an architecture in which it does not scale exactly the logits of one head.

    Args:
        run: the resolved config.
        model: the full model, on meta.

    Raises:
        ConfigError: the architecture does not support QK-Clip; gives the reason.
    """
    threshold = run.config.optimizer.params.qk_clip
    if threshold is None:
        return
    config: Any = model.config
    why = _known_reason(model, config) or _failure(config, length=run.config.data.sequence_length)
    if why is not None:
        raise ConfigError("optimizer.params.qk_clip", threshold, why=why, remedy="remove it")


def _known_reason(model: nn.Module, config: Any) -> str | None:
    kind, modules = config.model_type, attention_heads(model)
    norms = {name: None for each in modules for name in norms_of_heads(model.get_submodule(each.name))}
    if norms:
        named = " and ".join(norms)
        return (
            f"{kind} normalizes queries and keys after their projections ({named}), so that scaling these changes no"
            " logit; the norms bound the logits, and it has no need of it"
        )
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap:
        return f"{kind} caps its attention logits at {cap:g} (attn_logit_softcapping): it has no need of it"
    sections = (config, getattr(config, "attn_config", None))
    clamp = next((n for n in (getattr(each, "clip_qkv", None) for each in sections) if n), None)
    if clamp:
        return f"{kind} clamps queries and keys to +-{clamp:g} (clip_qkv): it has no need of it"
    if unmeasured := unmeasured_logits(config):
        return f"{kind} {unmeasured}"
    if not modules:
        return f"no softmax attention was found in {kind} whose projections of queries and keys are known"
    return None


def _failure(config: PretrainedConfig, *, length: int) -> str | None:
    kind = config.model_type
    try:
        tiny = random_model(
            shrink(config, divide=1, layers=2, vocab_size=_V, lengths=(length, _T)), attention=ATTENTION_NAME
        ).eval()
        logits = attention_logits(tiny)
    except ConfigError as error:
        return f"no tiny {kind} could be tried: {one_line(error)}"
    except Exception as error:  # each architecture fails in its own way
        return f"headrace's own attention, which measures the logits, fails on a tiny {kind}: {one_line(error)}"
    if not logits:
        return f"{kind} does not call headrace's own attention, which measures the logits"
    # in a layer that also has cross-attention, the first one
    layers = {_layer_of(tiny, each): each for each in reversed(attention_heads(tiny))}
    unknown = sorted(logits.keys() - layers.keys())
    if unknown:
        return f"attention of {kind} has queries and keys whose projections are not known (layer {unknown[0]})"
    for layer in logits:
        for factor in _FACTORS:
            if not scales_alone(tiny, layers[layer], layers[layer].key_heads - 1, factor, logits=logits[layer]):
                return (
                    f"scaling queries and keys of a head of a tiny {kind} does not scale its logits alone: something"
                    f" changes them between {layers[layer].name}'s projections and their product"
                )
    return None


@torch.no_grad()
def attention_logits(model: nn.Module) -> dict[Any, Tensor]:
    """Computes unscaled products of queries and keys, without a mask: layer -> [K, H / K, T, T].

    Args:
        model: a model that runs `models.attention`, not on meta.
    """
    found: dict[Any, Tensor] = {}

    def record(layer: int, query: Tensor, key: Tensor, _value: Tensor) -> None:
        grouped = query[0].unflatten(0, (key.shape[1], -1))
        found[layer] = grouped @ key[0].unsqueeze(1).mT

    decoder = Decoder(model, DecoderLayout(), parameter_owners(model))
    decoder.record_attention = record
    ids = torch.randint(_V, (1, _T), generator=torch.Generator().manual_seed(0))
    decoder.logits(ids, MicroBatch(ids, ids))
    return found


def scales_alone(model: nn.Module, heads: AttentionHeads, head: int, factor: float, *, logits: Tensor) -> bool:
    """Whether a factor on a key head multiplies its logits, and those of no other head in the layer.

    Args:
        model: a model that runs `models.attention`, not on meta; unchanged afterwards.
        heads: heads of an attention module.
        head: the key head.
        factor: the factor, above 0.
        logits: the layer's `attention_logits` without the factor.
    """
    with _scaled(model, heads, head, factor):
        after = attention_logits(model)[_layer_of(model, heads)]
    factors = torch.ones(len(logits), 1, 1, 1)
    factors[head] = factor
    sizes = logits.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-6)
    return bool(((after / factors - logits).abs() <= TOLERANCE * sizes).all())


def _layer_of(model: nn.Module, heads: AttentionHeads) -> Any:
    """Returns the layer index under which attention is recorded."""
    return getattr(model.get_submodule(heads.name), "layer_idx", None)


@contextmanager
def _scaled(model: nn.Module, heads: AttentionHeads, head: int, factor: float) -> Iterator[None]:
    """Applies a factor to a key head's rows of queries and keys within a block."""
    kept = {name: model.get_parameter(name).detach().clone() for name in heads.rows}
    for name, rows in heads.rows.items():
        factors = torch.where(rows.heads == head, factor**rows.powers, 1.0)
        shape = [-1 if dim == rows.dim else 1 for dim in range(len(rows.shape))]
        model.get_parameter(name).data.mul_(factors.view(shape))
    yield
    for name, values in kept.items():
        model.get_parameter(name).data.copy_(values)
