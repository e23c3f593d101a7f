"""Finds linear layers that compute a value and its gate, of which no name tells, and how their outputs alternate.

A candidate has twice as many outputs as another linear layer of its module has inputs: gated attention's `q_proj`
(Qwen3-Next: a head's query, then its gate), ModernBERT's `Wi` (all values, then all gates). Which outputs are which is
read from a tiny model: the derivative of the second layer's input with respect to the outputs. A gate changes one
feature; a query changes all features of its head; in an MLP both factors change one feature. A layer whose derivatives
show none of these patterns counts as one matrix.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.construction.initial_values import InitByName
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta
from pipeline.models.hf_config import config_from, config_key
from pipeline.models.layers import global_value
from pipeline.models.resize.shrink import shrink

_V, _T = 32, 16


def gated_layout(config: Any, module: nn.Module, projection: str) -> tuple[int, int] | None:
    """Returns groups of outputs and outputs of each of a group's two parts; None for a layer that is not gated.

    Args:
        config: the model's Hugging Face config.
        module: the module with the linear layer, of the whole model, on any device.
        projection: name of the layer in the module.
    """
    outputs = getattr(module, projection).out_features
    if _following(module, projection) is None:
        return None
    runs = _runs(config_key(config)).get((type(module).__name__, projection))
    if runs is None:
        return None
    groups, heads = runs
    if groups > 1:  # one for each head of the tiny model, or one for each feature
        groups = global_value(config, "num_attention_heads") if groups == heads else outputs // 2
    return (groups, outputs // groups // 2) if outputs % (2 * groups) == 0 else None


def _following(module: nn.Module, projection: str) -> str | None:
    """Returns the name of the last linear layer with half as many inputs as the projection has outputs."""
    outputs = getattr(module, projection).out_features
    linear = {name: each for name, each in module.named_children() if isinstance(each, nn.Linear)}
    return next(
        (n for n, each in reversed(linear.items()) if n != projection and 2 * each.in_features == outputs), None
    )


@cache
def _runs(key: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Maps (class of the module, layer) of gated layers to the groups of outputs and the heads of a tiny model."""
    config = config_from(key)
    try:
        small = shrink(config, divide=1, layers=2, vocab_size=_V)
        tiny = build_meta(small, dtype=torch.float32, attn_implementation="eager")
        materialize(tiny, InitByName(tiny, seed=0), device=torch.device("cpu"))
        heads = int(global_value(small, "num_attention_heads") or 0)
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for module in tiny.eval().modules():
            for name, each in list(module.named_children()):
                kind = type(module).__name__, name
                if not isinstance(each, nn.Linear) or kind in found or (second := _following(module, name)) is None:
                    continue
                groups = _groups(*_changed(tiny, each, getattr(module, second)))
                if groups is not None:
                    found[kind] = groups, heads
    except Exception:  # each architecture fails in its own way; its layers then count as whole
        return {}
    return found


def _changed(model: nn.Module, first: nn.Linear, second: nn.Linear) -> tuple[Tensor, Tensor]:
    """Computes which outputs of the first layer change which inputs of the second: bool [outputs, inputs].

    Returns:
        The outputs at the last position that change the inputs there, and those at earlier positions that do.
    """
    outputs, inputs = [], []

    def called(_layer: nn.Module, _args: Any, output: Tensor) -> Tensor:
        outputs.append(output.detach().requires_grad_())
        return outputs[-1]

    hooks = [
        first.register_forward_hook(called),
        second.register_forward_pre_hook(lambda _, args: inputs.append(args[0])),
    ]
    try:
        with torch.enable_grad():
            model(input_ids=torch.arange(_T)[None] % _V, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    rows = [torch.autograd.grad(each, outputs[0], **options)[0] for each in inputs[0].flatten(0, -2)[-1]]
    found = torch.stack([each.flatten(0, -2) for each in rows], 2).abs() > 0
    return found[-1], found[:-1].any(0)


def _groups(changed: Tensor, earlier: Tensor) -> int | None:
    """Returns the number of groups in which the two parts alternate; None if there are not two.

    Args:
        changed: which outputs change which inputs of the following layer at the same position.
        earlier: which do so at a later position: values of attention change one feature too, but at all positions.
    """
    alone = (changed.sum(1) == 1) & ~earlier.any(1)
    if bool(alone.all()) and bool((changed.sum(0) == 2).all()):
        second = changed.cumsum(0).gather(1, changed.int().argmax(1, keepdim=True))[:, 0] == 2
    elif 2 * int(alone.sum()) == len(alone) and bool((changed.sum(1) > 1)[~alone].all()):
        second = alone
    else:
        return None
    starts = 1 + (second[1:] != second[:-1]).nonzero().flatten()
    runs = len(starts) + 1
    even = len(second) % runs == 0 and torch.equal(starts, torch.arange(1, runs) * (len(second) // runs))
    return runs // 2 if even and runs % 2 == 0 else None
