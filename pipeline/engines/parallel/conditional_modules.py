"""Modules that call submodules depending on the data, e.g. only the chosen experts.

FSDP2 and ZeRO-2 add up the gradients that exist. If two ranks have gradients of different experts, they would add
gradients of different experts, or wait for each other forever. So every rank makes a gradient of zeros for its unused
experts. Only a user's own model has separate parameters for experts; in transformers 5, experts are rows of one tensor.

ZeRO-3 gathers a module's parameters when the module is called, on all ranks together: ranks that call it a different
number of times would wait for each other forever. So the whole block of such modules is gathered at once (DeepSpeed
calls it a leaf module). The blocks are found by running a tiny model of the architecture on several inputs.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from foundation.errors import ConfigError
from pipeline.engines.parallel.architecture_trial import random_model
from pipeline.models.resize.shrink import shrink

_V, _TOKENS, _INPUTS = 32, 2, 8
"""Number of ids, positions and inputs: few enough that some experts get no token."""

_LISTS = (nn.ModuleList, nn.ModuleDict)


def blocks_of_lists(model: nn.Module) -> list[nn.Module]:
    """Finds modules within a layer (an element of a list) that contain a list of modules, perhaps experts."""
    stacks = [module for module in model.modules() if isinstance(module, (*_LISTS, nn.Sequential))]
    within = {part for each in stacks for layer in each.children() for part in layer.modules()}
    return [m for m in model.modules() if m in within and any(isinstance(child, _LISTS) for child in m.children())]


def complete_gradients(model: nn.Module) -> None:
    """Gives every parameter of `blocks_of_lists` a gradient in each backward pass: zeros if it was not used."""
    for block in blocks_of_lists(model):
        block.register_forward_pre_hook(_use_all, with_kwargs=True)


def _use_all(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook: completes the gradients of all parameters at the end of the block's backward pass.

    The order is the same on every rank; ZeRO-2 puts gradients into buckets in this order.
    """
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    at = next((key for key, each in given.items() if isinstance(each, Tensor) and each.is_floating_point()), None)
    if at is None or not torch.is_grad_enabled():
        return None
    given[at] = _Used.apply(given[at], *(p for p in block.parameters() if p.requires_grad))
    return tuple(given[number] for number in range(len(args))), {key: given[key] for key in kwargs}


class _Used(torch.autograd.Function):
    """Returns its first argument; the gradients of all other arguments are zeros."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.zeros = [(each.new_zeros(()), each.shape) for each in parameters]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (*gradients, *(zero.expand(shape) for zero, shape in ctx.zeros))


def conditional_blocks(config: PretrainedConfig) -> list[type[nn.Module]]:
    """Finds the classes of the smallest modules that always run once, and call submodules depending on the data.

    Args:
        config: the real model's Hugging Face config. No class is found if its tiny model cannot be built or run.
    """
    try:
        tiny = random_model(shrink(config, divide=1, layers=2, vocab_size=_V))
        calls = _calls(tiny.eval())
    except ConfigError:
        return []
    except Exception:  # each architecture fails in its own way; a run would fail, too
        return []
    varying = {name for name in {name for each in calls for name in each} if len({each[name] for each in calls}) > 1}
    blocks: list[type[nn.Module]] = []
    for name in sorted(varying):
        block = name
        while block in varying or isinstance(tiny.get_submodule(block), nn.ModuleList | nn.ModuleDict):
            block = block.rpartition(".")[0]
        kind = type(tiny.get_submodule(block))
        if kind not in blocks and any(True for _ in tiny.get_submodule(block).parameters()):
            blocks.append(kind)
    return blocks


@torch.no_grad()
def _calls(model: nn.Module) -> list[Counter[str]]:
    """Counts the calls of each module, for every input."""
    found: list[Counter[str]] = []
    hooks = [module.register_forward_pre_hook(partial(_count, found, name)) for name, module in model.named_modules()]
    for number in range(_INPUTS):
        found.append(Counter())
        ids = torch.randint(_V, (1, _TOKENS), generator=torch.Generator().manual_seed(number))
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def _count(found: list[Counter[str]], name: str, *_call: Any) -> None:
    found[-1][name] += 1
