"""Finds the routers of a mixture of experts: the modules that choose the experts of every token.

Transformers can record a router's logits; its `_can_record_outputs` names the routers' class and the position of the
logits in their output. For N tokens, E experts and K experts per token, a router returns a tuple: the logits [N, E],
the weights of the chosen experts [N, K], and their indices, integers [N, K].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipeline.config.rules.experts import experts_of

BIAS = "e_score_correction_bias"
"""Buffer added to the scores only to choose experts. Source: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2."""
_BIASES = (BIAS, "expert_bias")
"""Its names in transformers 5.23: the second in AFMoE and LFM2."""


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a model is a mixture of experts, by its Hugging Face config."""
    return experts_of(config)[0] > 1


@dataclass(frozen=True)
class Router:
    """A router of a model.

    Attributes:
        name: name of the module.
        module: the router.
        logits: index of the logits in the router's output.
        experts: number of experts, E.
        bias_owner: name of the correction bias in the model, the module with it (the router, a module within it, or its
            block), and its name there; None without one.
        scores: linear layer within the router whose output is the logits, which the router may only return as
            probabilities (Gemma 4); None if the router has the weight itself.
    """

    name: str
    module: nn.Module
    logits: int
    experts: int
    bias_owner: tuple[str, nn.Module, str] | None
    scores: nn.Linear | None = None


@dataclass(frozen=True)
class Routed:
    """The output of a router for N tokens.

    Attributes:
        logits: [N, E].
        weights: [N, K], weights of the chosen experts.
        indices: int64 [N, K], indices of the chosen experts.
        weights_at: index of the weights in the router's output.
    """

    logits: Tensor
    weights: Tensor
    indices: Tensor
    weights_at: int


def find_routers(model: nn.Module) -> list[Router]:
    """Finds a model's routers, in the model's order; [] if it is dense or transformers does not name its routers."""
    recorded = list(_recorders(model))
    modules = dict(model.named_modules())
    found = [
        Router(name, module, recorder.index, experts, _bias_owner(name, modules), _scores(module))
        for name, module in modules.items()
        for recorder in recorded
        if _is_recorded(name, module, recorder) and (experts := _experts(module))
    ]
    around = {each.name for each in found if any(other.name.startswith(f"{each.name}.") for other in found)}
    return [each for each in found if each.name not in around]  # JetMoE's attention hands on its router's logits


def routed(output: Any, logits_at: int) -> Routed | None:
    """Reads a router's output; None if it is not the tuple that the module's docstring describes."""
    if not isinstance(output, tuple) or logits_at >= len(output):
        return None
    logits = output[logits_at]
    others = [(at, each) for at, each in enumerate(output) if at != logits_at and isinstance(each, Tensor)]
    chosen = [each for _, each in others if each.ndim == 2 and not each.is_floating_point()]
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(chosen) != 1 or len(logits) != len(chosen[0]):
        return None
    weights = [(at, each) for at, each in others if each.is_floating_point() and each.shape == chosen[0].shape]
    # the first: Inkling also returns factors of shared experts
    return Routed(logits, weights[0][1], chosen[0], weights[0][0]) if weights else None


def _recorders(model: Any) -> Iterator[Any]:
    for owner in (model, getattr(model, "base_model", model)):
        named = (getattr(owner, "_can_record_outputs", None) or {}).get("router_logits")
        if named is not None:
            yield from named if isinstance(named, list) else [named]
            return


def _is_recorded(name: str, module: nn.Module, recorder: Any) -> bool:
    if not isinstance(recorder, type):
        within = getattr(recorder, "layer_name", None)
        return isinstance(module, recorder.target_class) and (within is None or within in name)
    return False


def _experts(module: nn.Module) -> int:
    """Returns the number of experts that a router chooses from; 0 if its modules do not show it.

    These are the elements of its correction bias (Inkling's router has rows for shared experts, too), the rows of its
    weight, or the outputs of its last linear layer, unless that scores something else, too (Zaya: skipping all).
    """
    bias = module._buffers.get(BIAS)
    if bias is not None:
        return bias.numel()
    weight = module._parameters.get("weight")
    if weight is not None and weight.ndim == 2:
        return int(weight.shape[0])
    scores = _scores(module)
    outputs = 0 if scores is None else scores.out_features
    return outputs if getattr(module, "num_experts", outputs) == outputs else 0


def _scores(module: nn.Module) -> nn.Linear | None:
    linear = [each for each in module.modules() if isinstance(each, nn.Linear) and each is not module]
    return linear[-1] if linear and "weight" not in module._parameters else None


def _bias_owner(name: str, modules: dict[str, nn.Module]) -> tuple[str, nn.Module, str] | None:
    inside = [f"{name}.{child}" for child, _ in modules[name].named_children()]  # ERNIE's statistics
    for each in (name, name.rpartition(".")[0], *inside):
        for key in _BIASES:
            if modules[each]._buffers.get(key) is not None:
                return f"{each}.{key}", modules[each], key
    return None
