"""Runs an architecture's own initialization: its modules' constructors, then `_init_weights`.

For every module, transformers calls the `_init_weights` of the nearest model that contains it. Parameters that this
does not set keep the constructor's value (xIELU's parameters in Apertus, GPT-1's projections). A model built on the
meta device has no constructor's values, so the module is built again with the same arguments.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.models.multi_token import original_module


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's generators for a block, on the CPU and on the GPU if one is in use, and restores them afterwards.

    `torch.manual_seed` would record a stack trace for every kind of unused device (milliseconds each time), and
    `fork_rng` without a list of devices initializes all GPUs of the host.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


def init_weights(model: nn.Module, name: str) -> None:
    """Calls, on the module with this name, the `_init_weights` of the nearest model that contains it.

    A base model's may differ from that of the causal language model around it (xLSTM).
    """
    parts = name.split(".") if name else []
    path = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
    nearest: Any = next((module for module in path if isinstance(module, PreTrainedModel)), model)
    nearest._init_weights(path[0])


class Constructors:
    """Builds single modules of a model again, on the CPU, with the arguments that the architecture gives them.

    Args:
        model: model on meta, built by `build_meta`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: dict[type, dict[str, tuple[tuple[Any, ...], dict[str, Any]]]] = {}

    def value(self, owner: str, key: str, *, seed: int) -> Tensor | None:
        """Returns the value that a constructor sets, NaN where it sets none; None if the module cannot be built alone.

        Args:
            owner: name of the module.
            key: name of the parameter or buffer in the module.
            seed: seed of torch's generator while the constructor runs.
        """
        owner = original_module(self._model, owner)
        kind = type(self._model.get_submodule(owner))
        if kind not in self._calls:
            self._calls[kind] = self._recorded(kind)
        if owner not in self._calls[kind]:
            return None
        args, kwargs = self._calls[kind][owner]
        try:
            with seeded(seed), _uninitialized_is_nan(), torch.device("cpu"):
                module = kind(*args, **kwargs)
        except Exception:  # e.g. an argument is a module on meta
            return None
        found: Tensor | None = {**module._buffers, **module._parameters}.get(key)
        return None if found is None or found.is_meta else found.detach()

    def _recorded(self, kind: type[nn.Module]) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Records the constructor's arguments of all modules of a class, by the module's name."""
        calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        original: Any = kind.__init__

        @functools.wraps(original)
        def record(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            calls[id(module)] = (args, kwargs)
            original(module, *args, **kwargs)

        config = copy.deepcopy(self._model.config)
        kind.__init__ = record  # type: ignore[assignment, method-assign]
        try:
            with torch.device("meta"):
                built = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        finally:
            kind.__init__ = original  # type: ignore[method-assign]
        return {name: calls[id(module)] for name, module in built.named_modules() if id(module) in calls}


@contextmanager
def _uninitialized_is_nan() -> Iterator[None]:
    """Fills uninitialized floating-point memory with NaN: accidental zeros would look intended."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
