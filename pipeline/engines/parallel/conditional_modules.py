"""Finds the modules that call others as often as the data want, such as experts of which only the chosen ones run.

ZeRO-3 gathers a module's parameters when the module is called, on all ranks together: ranks that call it a different
number of times would wait for each other forever. So the whole block of such modules is gathered at once (DeepSpeed
calls it a leaf module). Which blocks these are is found by running a tiny model of the architecture on several inputs.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from headrace.base.errors import ConfigError
from pipeline.engines.parallel.architecture_trial import random_model
from pipeline.models.resize.shrink import shrink

_V, _TOKENS, _INPUTS = 32, 2, 8
"""Ids, positions and number of the inputs: so few tokens do not go to all experts."""


def conditional_blocks(config: PretrainedConfig) -> list[type[nn.Module]]:
    """Classes of the smallest modules that run once whatever the data, and call others that depend on it.

    Args:
        config: of the real model. Empty where no tiny model of its architecture can be built or run.
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
    """For every input, how often each module is called."""
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
