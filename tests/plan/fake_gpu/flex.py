"""Lowers our attention over packed documents, forward and backward, and builds its kernels; prints JSON.

    python -m tests.plan.fake_gpu.flex LENGTH [WINDOW]

With a window, attention also has a soft cap, a bias of keys and sinks. Heads as in Llama-3.1-8B, one sample, bf16. The
mask is made as the decoder makes it: before the compiled layers.
"""

from __future__ import annotations

import json
import re
import sys
from math import prod
from typing import Any

from tests.plan.fake_gpu.lowering import BACKEND, SM, build_cubins, lowering  # isort: skip  before torch
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pipeline.plan.fake_gpu.device as fake
from pipeline.models.attention import attend
from pipeline.models.attention_scores import ScoreRule
from pipeline.models.masks import make_mask

HEADS, KEY_HEADS, HEAD_SIZE = 32, 8, 128


class LargestTensor(TorchDispatchMode):
    """Keeps the elements of the largest tensor that an operator returned while it was active."""

    elements = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        found = [each.numel() for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.elements = max([self.elements, *found])
        return result


def largest_buffer(code: str) -> int:
    """Elements of the largest tensor that the wrapper of compiled kernels allocates."""
    shapes = re.findall(r"empty_strided_cuda\(\(([\d, ]+)\)", code)
    return max((prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes), default=0)


def main() -> None:
    length, window = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None
    device, largest = torch.device("cuda", 0), LargestTensor()
    with fake.fake_tensors(), lowering() as graphs:
        with largest:
            documents = torch.zeros(1, length, dtype=torch.int32, device=device)
            mask = make_mask(documents, window, length=length, dtype=torch.bfloat16, device=device)
        query, key, value = (
            torch.empty(1, heads, length, HEAD_SIZE, dtype=torch.bfloat16, device=device, requires_grad=True)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        rule = None
        if window is not None:
            sinks = torch.empty(HEADS, dtype=torch.bfloat16, device=device, requires_grad=True)
            rule = ScoreRule(softcap=50.0, bias=torch.empty(1, HEADS, length, device=device), sinks=sinks)
        run = torch.compile(attend, fullgraph=True, dynamic=False, backend=BACKEND)
        run(query, key, value, scale=HEAD_SIZE**-0.5, mask=mask, rule=rule).backward(torch.empty_like(query))
        found = []
        for graph in graphs:
            cubins = build_cubins(graph, capability=SM)
            shared = max(size for _, size in cubins.values())
            shape = {"backward": graph.backward, "kernels": len(graph.kernels), "cubins": len(cubins)}
            found.append({**shape, "shared_memory": shared, "largest": largest_buffer(graph.code)})
            found[-1]["sources"] = [name for name, _ in graph.kernels]
    print(json.dumps({"mask": largest.elements, "graphs": found}))


if __name__ == "__main__":
    main()
