"""torch.compile of the decoder layers, one by one, and of the loss: the layers of a kind share one compiled graph.

A layer is compiled with its activation checkpointing inside, so that the compiler decides about recomputation, and
before it is sharded, so that the hooks of FSDP2 and of ZeRO stay outside. A layer that cannot be one graph is compiled
within its checkpoint: the compiler would not compile any of a checkpoint with a graph break in it.
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
"""Name of the layer that is called now. A graph is shared by all layers of a kind, so no name may be part of it."""


def compiles(section: CompileSection) -> bool:
    """Whether layers are compiled: as the config says, else where there is a GPU."""
    return torch.cuda.is_available() if section.enabled is None else section.enabled


def eager(*, compiled: bool) -> AbstractContextManager[Any]:
    """Context in which compiled layers run eagerly: its passes have shapes that no graph was compiled for."""
    stance: Any = torch.compiler.set_stance
    return stance("force_eager") if compiled else nullcontext()


def check_compile(section: CompileSection) -> None:
    """Refuses a compilation that cannot work on this machine, before a process group exists.

    Raises:
        ConfigError: an unknown backend, or one whose compiler is missing.
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
    """Returns the tool that inductor would miss at the first step, and its package; None if none is missing."""
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

    Call it after all other changes but sharding.

    Args:
        model: this rank's part of the model, on any device.
        section: the config's `compile`.
        whole_graph: each layer must be one graph: a graph break is an error, since it would cost time in silence.
    """
    if not compiles(section):
        return
    options: dict[str, Any] = {"dynamic": False, "backend": NamingBackend(section.backend, section.mode)}
    for name, layer in model.named_modules():
        if isinstance(layer, GradientCheckpointingLayer):
            # its forward function only: the hooks of FSDP2 and ZeRO run outside of the compiler
            which = WITHIN if not whole_graph and hasattr(layer, WITHIN) else "forward"
            setattr(layer, which, named(torch.compile(getattr(layer, which), fullgraph=whole_graph, **options), name))
        elif isinstance(layer, FusedHead):
            # but for the matrix products, which no compiler makes faster
            layer.compiled = named(torch.compile(loss_and_gradient, fullgraph=True, **options), f"the loss of {name}")


def compilation_clock(section: CompileSection) -> Callable[[], tuple[int, float]]:
    """Makes a function that returns the graphs compiled since its last call, and the seconds that took."""
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
        """Compilations and seconds since the last call. A backward pass is compiled with its forward pass or later."""
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
    """A backend of torch.compile that wraps one of torch's, with errors that name the layer.

    torch compiles a layer's forward pass at its first call and its backward pass in the first backward pass, when the
    layer's call is long over. So the compiler of the backward graph is wrapped while the layer is called.

    Equal backends share their graphs.

    Attributes:
        backend: a name that torch knows. The backward pass is named with inductor alone: other backends of torch make
            no kernels for it, so that there is nothing to fail.
        mode: inductor's mode, e.g. default.
    """

    backend: str
    mode: str

    def __call__(self, graph: Any, examples: Any) -> Any:
        """Compiles a graph; with inductor its backward graph later."""
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
                raise  # the call of the layer names it
            raise _refusal(f"the backward pass of {layer}", error) from error

    return compile_graph


def named(compiled: Callable[..., Any], layer: str) -> Callable[..., Any]:
    """Wraps a call compiled by a `NamingBackend`: a failure names the layer, and the key that turns compilation off.

    Raises:
        ConfigError: the compilation fails, in the call; that of a backward pass, when it is run.
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
    """Returns a remedy if the error is a damaged file of inductor's cache: a compiler that was killed leaves one."""
    from torch._inductor.runtime.runtime_utils import cache_dir  # noqa: PLC0415

    folder = cache_dir()
    return f"rm -r {folder} (a killed compilation left incomplete files there), or " if f"{folder}/" in error else ""
