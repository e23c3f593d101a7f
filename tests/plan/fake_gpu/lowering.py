"""A compiler backend that lowers graphs for the fake GPU as Inductor does, keeps what it made, and runs nothing.

It needs Triton. Import it in a process with the fake device. Training goes on with fake tensors, so that every graph of
a step is seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pipeline.plan.fake_gpu.device  # noqa: F401  isort: skip  before torch
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
import triton
from torch._inductor import graph, ir
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.runtime import triton_helpers
from torch.utils.flop_counter import flop_registry
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from pipeline.engines.parallel import fused_head

BACKEND = "fake_h200"
"""Name of the backend, for `compile.backend`."""

aten: Any = torch.ops.aten
_LOSS = str(fused_head.__file__)
"""File whose operators are those of the loss."""

SM = 90
"""Compute capability for which kernels are built: Hopper's."""


@dataclass
class Lowered:
    """A graph as Inductor lowered it.

    Attributes:
        backward: whether it is of a backward pass.
        code: source of the wrapper, with its Triton kernels.
        fused_bytes: read and written by its Triton kernels.
        products: (FLOPs, bytes) of each matrix product and attention, and of what else runs outside of Triton but
            collectives.
        part: "layers", or "loss" of the loss that is fused with the head.
        calls: how often it was called.
    """

    backward: bool
    code: str
    fused_bytes: int
    products: list[tuple[int, int]] = field(default_factory=list)
    part: str = "layers"
    calls: int = 0

    @property
    def kernels(self) -> list[tuple[str, str]]:
        return re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", self.code, re.DOTALL)


class _Module:
    """In the place of the compiled wrapper."""

    __file__ = "/dev/null"

    def call(self, *_args: Any) -> None:
        raise AssertionError("compiled code is not run here")


class _Driver:
    """In the place of Triton's driver for CUDA, which looks for libcuda."""

    def __getattr__(self, name: str) -> Any:
        answers = {
            "get_current_target": lambda: GPUTarget("cuda", SM, 32),
            "get_current_device": lambda: 0,
            "get_current_stream": lambda _device=None: 0,
            "get_active_torch_device": lambda: torch.device("cuda", 0),
            "get_device_interface": lambda: torch.cuda,
            "is_active": lambda: True,
        }
        if name not in answers:
            raise AttributeError(name)
        return answers[name]


@contextmanager
def lowering() -> Iterator[list[Lowered]]:
    """Within, `BACKEND` is a backend of torch.compile; yields the graphs that it has lowered so far."""
    driver._default = _Driver()  # type: ignore[attr-defined]
    driver.set_active(driver._default)
    triton_helpers.set_driver_to_gpu = lambda: None  # type: ignore[assignment]
    found: list[Lowered] = []
    before, ours = graph.GraphLowering.compile_to_module, {"compile_threads": 1, "force_disable_caches": True}
    ours |= {"joint_graph_constant_folding": False, "use_static_cuda_launcher": False}

    def keep(self: Any) -> Any:
        wrapper, _ = self.codegen()
        found.append(Lowered(False, wrapper.value, *_costs(self.scheduler.nodes)))
        self.cache_key, self.cache_path, self.cache_linemap = "none", "/dev/null", []
        return _Module()

    def lower(module: torch.fx.GraphModule, examples: list[Any], *, part: str, **options: Any) -> Any:
        kept, known = _copied(module), len(found)
        compile_fx_inner(module, examples, **options)
        if len(found) == known:  # nothing to compute, and so nothing was lowered
            found.append(Lowered(False, "", 0))
        lowered = found[-1]
        lowered.backward, lowered.part = bool(options.get("is_backward", False)), part

        def run(args: list[Any]) -> Any:
            lowered.calls += 1
            given = list(args)
            args.clear()
            return kept(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        traces = (node.meta.get("stack_trace") or "" for node in module.graph.nodes)
        part = "loss" if any(_LOSS in trace for trace in traces) else "layers"
        return compile_fx(module, examples, inner_compile=partial(lower, part=part))

    graph.GraphLowering.compile_to_module = keep  # type: ignore[assignment, method-assign]
    if BACKEND not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(backend, name=BACKEND)  # type: ignore[arg-type]
    try:
        # a fake device has no generator of random numbers
        with inductor.patch(ours), functorch.patch(graphsafe_rng_functionalization=False):
            yield found
    finally:
        graph.GraphLowering.compile_to_module = before  # type: ignore[method-assign]
        torch._dynamo.backends.registry._BACKENDS.pop(BACKEND, None)
        torch._dynamo.reset()


def build_cubins(lowered: Lowered, *, capability: int = SM) -> dict[str, tuple[int, int]]:
    """Builds every Triton kernel of a graph in its first configuration, by Triton and ptxas.

    Args:
        lowered: the graph.
        capability: compute capability, 90 or 100.

    Returns:
        kernel -> bytes of its cubin and of the shared memory of a block.
    """
    made = {}
    for name, source in lowered.kernels:
        kernel: Any = getattr(PyCodeCache.load(source), name)
        config = kernel.configs[0]
        meta = kernel._create_compile_meta(config)
        given = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
        options = kernel._create_compile_options(config, meta)
        built = triton.compile(given, target=GPUTarget("cuda", capability, 32), options=options)
        made[name] = len(built.asm["cubin"]), int(built.metadata.shared)
    return made


def _copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph as it is now: Inductor rewrites the one that it gets."""
    nodes = torch.fx.Graph()
    outputs = nodes.graph_copy(module.graph, {})
    nodes.output(outputs)
    return torch.fx.GraphModule(module, nodes)


def _costs(nodes: list[Any]) -> tuple[int, list[tuple[int, int]]]:
    """`Lowered.fused_bytes` and `Lowered.products` of a graph's kernels."""
    fused, products, counted = 0, [], set[Any]()
    for node in nodes:
        size = int(node.get_read_write_buffers_sizes())
        if not node.is_extern():
            fused += size
        elif size and not isinstance(node.node, ir._CollectiveKernel):
            products.append((_flops(node, counted), size))
    return fused, products


def _flops(node: Any, counted: set[Any]) -> int:
    """FLOPs of an operator outside Triton, by torch's formulas; of causal attention the half that kernels compute.

    An operator with several outputs is several nodes: it counts once, and is added to `counted`.
    """
    flops = 0
    for each in set(node.node.origins) - counted:
        operator, args, kwargs = _called(each)
        if operator not in flop_registry and operator is not aten._grouped_mm:
            continue
        counted.add(each)
        args, kwargs = torch.fx.map_arg((args, kwargs), lambda given: given.meta["val"])
        flops += flops_of(operator, args, kwargs, each.meta["val"])
    return flops


def flops_of(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of a call of an operator (overload packet); 0 where it is no product. See `_flops`."""
    if operator is aten._grouped_mm:  # of experts: [N, K] x [E, K, M], or [K, N] x [N, M] for gradients of weights
        return int(2 * args[0].numel() * args[1].shape[-1])
    if operator not in flop_registry:
        return 0
    flops = int(flop_registry[operator](*args, **kwargs, out_val=result))
    return flops // 2 if "attention" in str(operator) else flops


def _called(node: torch.fx.Node) -> tuple[Any, Any, Any]:
    """Operator, arguments and keyword arguments of a node.

    With activation checkpointing, attention is called by an operator that keeps the state of random numbers for its
    recomputation, or sets it.
    """
    target, args = node.target, node.args
    wrapped = {"run_and_save_rng_state": 0, "run_with_rng_state": 1}.get(str(target))
    if wrapped is not None:
        target, args = args[wrapped], args[wrapped + 1 :]  # type: ignore[assignment]
    return getattr(target, "overloadpacket", None), args, node.kwargs
