"""Compilations that fail name the layer, in the forward pass and in the backward pass, and the key that turns them off.

torch compiles a layer's forward pass at its first call and its backward pass in the first backward pass, where the call
of the layer is long over. So the compiler of the backward graph is wrapped while the layer is called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from headrace.base.errors import ConfigError

KEY = "compile.enabled"

_LAYER: ContextVar[str] = ContextVar("layer")
"""Name of the layer that is called now. A graph is shared by all layers of a kind, so no name may be part of it."""


@dataclass(frozen=True)
class NamingBackend:
    """A backend of torch.compile that wraps one of torch's, with errors that name the layer.

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
