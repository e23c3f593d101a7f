"""Imports ahead of time, in a process that (or whose forks) will become a rank."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Iterable

from foundation.quick_imports import quick_imports


def preload(modules: Iterable[str], engines: Collection[str], model_types: Iterable[str]) -> None:
    """Imports the modules that every rank would otherwise import itself, some only at the first step.

    Args:
        modules: further modules, by name.
        engines: names of the engines to import: reference, torch, deepspeed.
        model_types: Hugging Face's `model_type` of the models.
    """
    modules = [*modules, "transformers.generation.utils"]
    modules += [f"transformers.models.{kind}.modeling_{kind}" for kind in sorted(model_types)]
    for engine in engines:
        modules += _IMPORTS[engine]
    with quick_imports():
        for name in modules:
            with contextlib.suppress(ImportError):  # the code that needs the module raises a better error
                importlib.import_module(name)
    if "deepspeed" in engines:
        with contextlib.suppress(ImportError, RuntimeError):
            from pipeline.engines.deepspeed.operators import skip_shared_memory  # noqa: PLC0415

            skip_shared_memory()


_IMPORTS = {
    "reference": ("pipeline.engines.torch_native.reference",),
    "torch": (
        "pipeline.engines.torch_native.single",
        "pipeline.engines.torch_native.parallel",
        "pipeline.engines.torch_native.pipeline",
    ),
    "deepspeed": (
        "pipeline.engines.deepspeed.zero",
        "pipeline.engines.deepspeed.pipeline",
        # imported when a model is wrapped; the first imports torch's compiler, which takes two seconds
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.module_inject.auto_ep_layer",
        "torch.utils.cpp_extension",
    ),
}
