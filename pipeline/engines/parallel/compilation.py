"""torch.compile of the decoder layers, one by one, and of the loss: layers of the same kind share one compiled graph.

A layer is compiled together with its activation checkpointing, so that the compiler decides about recomputation. It is
compiled before sharding, so that the hooks of FSDP2 and ZeRO stay outside. A layer that cannot be one graph is compiled
inside its checkpoint, since the compiler skips a checkpoint with a graph break.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from foundation.errors import ConfigError
from foundation.section import suggest
from pipeline.config.sections.run import CompileSection
from pipeline.engines.parallel.activation_checkpointing import WITHIN
from pipeline.engines.parallel.fused_head import FusedHead, loss_and_gradient

KEY = "compile.enabled"
_LAYER: ContextVar[str] = ContextVar("layer")
"""Name of the layer that is running. All layers of a kind share a graph, so a graph must not contain a name."""


def compiles(section: CompileSection) -> bool:
    """Whether layers are compiled: as the config sets it, by default if there is a GPU."""
    return torch.cuda.is_available() if section.enabled is None else section.enabled


def eager(*, compiled: bool) -> AbstractContextManager[Any]:
    """Returns a context in which compiled layers run eagerly, for passes with shapes that no graph was compiled for."""
    stance: Any = torch.compiler.set_stance
    return stance("force_eager") if compiled else nullcontext()


def check_compile(section: CompileSection) -> None:
    """Refuses a compilation that cannot work on this machine, before a process group exists.

    Raises:
        ConfigError: the backend is unknown, or its compiler is missing.
    """
    if not compiles(section):
        return
    known = torch._dynamo.list_backends(exclude_tags=())
    if section.backend not in known:
        near = suggest(section.backend, known)
        remedy = f"did you mean '{near}'?" if near else "use inductor"
        raise ConfigError("compile.backend", section.backend, why="torch has no such backend", remedy=remedy)
    if section.backend != "inductor":
        return
    if missing := _missing(on_gpu=torch.cuda.is_available()):
        why, package = missing
        raise ConfigError(KEY, section.enabled, why=why, remedy=f"install {package}, or set it to false")


def _missing(*, on_gpu: bool) -> tuple[str, str] | None:
    """Returns a missing tool that inductor needs at the first step, and its package; None if none is missing."""
    if on_gpu and importlib.util.find_spec("triton") is None:
        return "inductor writes GPU kernels in Triton, which is not installed", "triton"
    if on_gpu and "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton compiles the launcher of each kernel, and there is no C compiler", "gcc"
    cxx = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # inductor tries no other
    if not on_gpu and shutil.which(cxx) is None:
        return f"inductor compiles C++ for a CPU, and there is no {cxx}", cxx
    headers = [
        Path(sysconfig.get_path("include", scheme)) for scheme in (sysconfig.get_default_scheme(), "posix_prefix")
    ]
    if not any((folder / "Python.h").exists() for folder in headers):
        return f"code of inductor includes Python.h, which is not in {headers[0]}", "python3-dev"
    return None


def apply_compile(model: nn.Module, section: CompileSection, *, whole_graph: bool) -> None:
    """Compiles every decoder layer of a model at its first call, and the loss and its gradient of a fused head.

    Must be called after all other changes except sharding.

    Args:
        model: this rank's part of the model, on any device.
        section: the config's `compile`.
        whole_graph: whether each layer must be one graph; a graph break, which silently costs time, is an error.
    """
    if not compiles(section):
        return
    options: dict[str, Any] = {"dynamic": False, "backend": NamingBackend(section.backend, section.mode)}
    for name, layer in model.named_modules():
        if isinstance(layer, GradientCheckpointingLayer):
            # compiles only its forward function: the hooks of FSDP2 and ZeRO run outside of the compiler
            which = WITHIN if not whole_graph and hasattr(layer, WITHIN) else "forward"
            setattr(layer, which, named(torch.compile(getattr(layer, which), fullgraph=whole_graph, **options), name))
        elif isinstance(layer, FusedHead):
            # without the matrix products, which no compiler makes faster
            layer.compiled = named(torch.compile(loss_and_gradient, fullgraph=True, **options), f"the loss of {name}")


def compilation_clock(section: CompileSection) -> Callable[[], tuple[int, float]]:
    """Makes a function that returns the number of graphs compiled since its last call, and the seconds they took."""
    return _clock().take if compiles(section) else lambda: (0, 0.0)


@cache
def _clock() -> CompileClock:
    return CompileClock()


class CompileClock:
    """Counts compilations of this process and their time, so that a slow step is explained."""

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler  # noqa: PLC0415  a second, where nothing is compiled

        self._count, self._seconds, self._started = 0, 0.0, 0.0
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    def take(self) -> tuple[int, float]:
        """Returns compilations and seconds since the last call; backward passes may be compiled later."""
        taken = self._count, self._seconds
        self._count, self._seconds = 0, 0.0
        return taken

    def _start(self, _args: object) -> None:
        self._started = time.perf_counter()

    def _end(self, _args: object) -> None:
        self._count += 1
        self._seconds += time.perf_counter() - self._started


@dataclass(frozen=True)
class NamingBackend:
    """A backend of torch.compile that wraps one of torch's backends; its errors name the layer.

    torch compiles a layer's forward pass in the layer's first call, and its backward pass in the first backward pass,
    long after that call. So the compiler of the backward graph is wrapped while the layer is called.

    Equal backends share their graphs.

    Attributes:
        backend: name of a torch backend. Only inductor's errors name a backward pass: other backends make no kernels
            for it that could fail.
        mode: inductor's mode, e.g. default.
    """

    backend: str
    mode: str

    def __call__(self, graph: Any, examples: Any) -> Any:
        """Compiles a graph; inductor compiles its backward graph later."""
        compiler: Callable[..., Any] = torch._dynamo.lookup_backend(self.backend)
        if self.backend != "inductor":
            return compiler(graph, examples)
        from torch._inductor import list_mode_options  # noqa: PLC0415  seconds, where nothing is compiled

        patches = {} if self.mode == "default" else list_mode_options(self.mode, dynamic=False)
        return compiler(graph, examples, inner_compile=_naming_compiler(_LAYER.get()), config_patches=patches)


def _naming_compiler(layer: str) -> Callable[..., Any]:
    """Wraps inductor's compiler of one graph: a failure in a backward graph names the layer."""
    from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415

    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        try:
            return compile_fx_inner(*args, **kwargs)
        except Exception as error:
            if not kwargs.get("is_backward"):
                raise  # the wrapped call names the layer
            raise _refusal(f"the backward pass of {layer}", error) from error

    return compile_graph


def named(compiled: Callable[..., Any], layer: str) -> Callable[..., Any]:
    """Wraps a call compiled by a `NamingBackend`: a failure names the layer, and the key that turns compilation off.

    Raises:
        ConfigError: the compilation fails; raised by the call, or for a backward pass when that runs.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        token = _LAYER.set(layer)
        try:
            return compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise _refusal(layer, error) from error
        finally:
            _LAYER.reset(token)

    return call


def _refusal(what: str, error: Exception) -> ConfigError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = f"{what} cannot be compiled: {' '.join(lines[:3])[:400]}"
    return ConfigError(KEY, True, why=why, remedy=f"{_without_incomplete_files(str(error))}set it to false")


def _without_incomplete_files(error: str) -> str:
    """Returns a remedy if the error is a damaged file in inductor's cache, which a killed compiler leaves."""
    from torch._inductor.runtime.runtime_utils import cache_dir  # noqa: PLC0415

    folder = cache_dir()
    return f"rm -r {folder} (a killed compilation left incomplete files there), or " if f"{folder}/" in error else ""
