"""Converts experts to separate linear layers, where transformers has the weights of all experts in one tensor.

transformers 5 stacks experts, [E, 2 F, D] and [E, D, F]; model folders and serving programs have one matrix per expert
and projection. Only separate matrices can be calibrated, rounded and packed like every other linear layer.

Shapes: E experts, N tokens, D model, F features of an expert, K experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foundation.errors import DataError
from pipeline.models.construction.stored_names import groups_of_model

FUSED = ("gate_up_proj", "down_proj")
"""The two stacked tensors of a module of experts in transformers."""


class Expert(nn.Module):
    """Computes down(act(gate(x)) * up(x)); the three linear layers have the names used in model folders.

    Args:
        names: names of the linear layers gate, up and down.
        weights: weights of gate, up and down: [F, D], [F, D], [D, F].
        act: the activation.
    """

    def __init__(self, names: tuple[str, str, str], weights: tuple[Tensor, Tensor, Tensor], act: nn.Module) -> None:
        super().__init__()
        self._names, self._act = names, act
        for name, weight in zip(names, weights, strict=True):
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            layer.weight = nn.Parameter(weight, requires_grad=False)
            self.add_module(name, layer)

    def forward(self, states: Tensor) -> Tensor:
        """Computes [N, D] -> [N, D]."""
        gate, up, down = (self.get_submodule(name) for name in self._names)
        found: Tensor = down(self._act(gate(states)) * up(states))
        return found


class UnfusedExperts(nn.ModuleList):
    """Separate expert modules that replace a module of stacked experts."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Maps [N, D], indices [N, K], weights [N, K] to [N, D]. An expert without tokens runs on an empty tensor."""
        out = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            token, place = torch.where(top_k_index == number)
            weighted = expert(hidden_states[token]) * top_k_weights[token, place, None]
            out.index_add_(0, token, weighted.to(out.dtype))
        return out


def unfuse_experts(model: nn.Module) -> int:
    """Replaces every module of stacked experts, in place, without copying weights.

    Returns:
        Number of modules that were replaced.

    Raises:
        DataError: stacked experts have an unknown form (biases, transposed weights, other names).
    """
    fused = [name for name, module in model.named_modules() if is_fused(module)]
    for name in fused:
        model.set_submodule(name, _unfused(model, name))
    return len(fused)


def is_fused(module: nn.Module) -> bool:
    """Whether a module has the stacked weights of experts."""
    return all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in FUSED)


def folder_names(model: nn.Module, names: list[str]) -> dict[str, str]:
    """Maps modules to names in model folders, e.g. `mlp.experts.0.w1` to `block_sparse_moe.experts.0.w1` in Mixtral.

    Args:
        model: model whose experts are unfused.
        names: names of modules with a weight.
    """
    stored = {group.names[0]: group.key for group in groups_of_model(model, [f"{name}.weight" for name in names])}
    return {name: stored[f"{name}.weight"].removesuffix(".weight") for name in names}


def _unfused(model: nn.Module, name: str) -> UnfusedExperts:
    module = model.get_submodule(name)
    if {each for each, _ in module.named_parameters()} != set(FUSED):
        raise _unknown(name, f"its tensors are {', '.join(each for each, _ in module.named_parameters())}")
    both, down = (getattr(module, each).detach() for each in FUSED)
    names = (*_leaves(model, f"{name}.{FUSED[0]}", both), *_leaves(model, f"{name}.{FUSED[1]}", down))
    if len(names) != 3 or both.shape[1] != 2 * down.shape[2]:
        raise _unknown(name, f"they are stored as {', '.join(names)}")
    halves = both.shape[1] // 2
    act = module.get_submodule("act_fn")
    return UnfusedExperts(
        Expert((names[0], names[1], names[2]), (both[n, :halves], both[n, halves:], down[n]), act)
        for n in range(len(both))
    )


def _leaves(model: nn.Module, name: str, value: Tensor) -> list[str]:
    """Returns the names in files of the parts of expert 0, in their order in the stacked tensor."""
    (group,) = groups_of_model(model, [name])
    if group.converter is None:
        raise _unknown(name, "transformers stores it as it is")
    stored = group.convert({name: torch.empty(value.shape, device="meta")}, model)
    return [each.split(".")[-2] for each in stored if ".experts.0." in each]


def _unknown(name: str, why: str) -> DataError:
    remedy = (
        "leave it in 16 bits, or quantize a model whose folder has every expert by itself (Mixtral, Qwen3-MoE, OLMoE)"
    )
    return DataError(f"the experts {name} cannot be taken apart: {why}\n  try: {remedy}")
