"""FLOPs and bytes of what is not compiled, operator by operator. python -m tests.plan.fake_gpu.eager CASE PART

PART is "layers" or "loss", by which all that is outside of the layers is meant.

An operator reads its inputs and writes its results. Left out are collectives with the copies of FSDP2 around them, and
the optimizer with its gradient norm, which the roofline counts by formulas.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pipeline.plan.fake_gpu.step import run_compiled_step  # isort: skip  before anything that imports torch
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.engines.base import TrainsStepByStep
from pipeline.plan.fake_gpu.case import EAGER, StepCase
from tests.plan.fake_gpu.lowering import flops_of

aten: Any = torch.ops.aten

_GATHERS = {aten.index, aten.gather, aten.index_select, aten.embedding}
"""Operators that read as much of their first argument as they return."""
_ALLOCATIONS = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided}
_ELSEWHERE = ("c10d", "_c10d_functional", "fsdp", "prim")
"""Namespaces of collectives, of FSDP2's copies, and of questions that read no memory."""
_COPIES_OF_FSDP = {aten.split_with_sizes_copy, aten._chunk_cat}


class OperatorCosts(TorchDispatchMode):
    """Counts operators called while it is active: (FLOPs, bytes), FLOPs 0 of what is no product -> how often."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        packet = op.overloadpacket
        left_out = op.is_view or op.namespace in _ELSEWHERE or packet in _ALLOCATIONS | _COPIES_OF_FSDP
        if not left_out and not op.__name__.startswith(("_foreach_", "_fused_adam")):
            size = _bytes(result) + (_bytes(result) + _bytes(args[1:]) if packet in _GATHERS else _bytes(args))
            if size:
                self.costs[flops_of(packet, args, kwargs or {}, result), size] += 1
        return result


def costs_of(case: StepCase, part: str) -> Counter[tuple[int, int]]:
    """Costs of one micro-batch, forward and backward: of all layers of the case, or of what is outside of them."""
    layers = case.resolved().config.model.config["num_hidden_layers"]  # type: ignore[index]
    few, many = (_costs(replace(case, overrides=(*case.overrides, EAGER, _layers(n * layers)))) for n in (1, 2))
    added = many - few  # by as many layers again
    return added if part == "layers" else few - added


def _costs(case: StepCase) -> Counter[tuple[int, int]]:
    costs = OperatorCosts()
    with _during_steps(costs):
        run_compiled_step(case)
    return costs.costs


@contextmanager
def _during_steps(mode: TorchDispatchMode) -> Iterator[None]:
    """A mode is active in every training step within: above fake tensors, and not while the engine is built."""
    before = TrainsStepByStep.train_step

    def train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return before(self, *args, **kwargs)

    TrainsStepByStep.train_step = train_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrainsStepByStep.train_step = before  # type: ignore[method-assign]


def _layers(count: int) -> str:
    return f"model.config.num_hidden_layers={count}"


def _bytes(values: Any) -> int:
    """Bytes of the device's tensors; those of an expanded dim are read once."""
    found = {id(each): each for each in tree_leaves(values) if isinstance(each, Tensor) and each.device.type == "cuda"}
    total = 0
    for each in found.values():
        elements = 1
        for size, stride in zip(each.shape, each.stride(), strict=True):
            elements *= int(size) if stride else 1
        total += elements * each.element_size() if each.numel() else 0
    return total


def main() -> None:
    """Entry point: prints a part as a graph of `tests.plan.fake_gpu.lower`, without kernels, called once.

    The head's products are counted elsewhere.
    """
    fields, part = json.loads(sys.argv[1]), sys.argv[2]
    costs = costs_of(StepCase(**{**fields, "overrides": tuple(fields["overrides"])}), part)
    products = [list(cost) for cost in sorted(costs.elements()) if cost[0]] if part == "layers" else []
    others = sum(size * count for (flops, size), count in costs.items() if not flops)
    print(json.dumps({"part": part, "eager": True, "calls": 1, "fused_bytes": others, "products": products}))


if __name__ == "__main__":
    main()
