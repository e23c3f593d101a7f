"""The head and its loss: ours, torch's F.linear_cross_entropy, recomputed chunks, and the unfused one, side by side.

    python -m benchmarks.head_loss --rows 4096 --features 512 --vocabulary 32768 --chunk 2048 --dtype bf16

Prints ratios of time (median and quartiles of rounds in which all take turns), elements of the largest tensor, bytes
kept between forward and backward pass, and relative errors against fp64. Runs on a GPU where there is one.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.fused_head import LossTask, fuse_head, loss_and_gradient
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY
from tests.engines.parallel.allocations import AllocationRecorder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COLUMNS = (
    "time against unfused",
    "seconds",
    "largest tensor",
    "kept between the passes",
    "error of the loss",
    "of the hidden states' gradient",
    "of the weight's",
)
LossOf = Callable[[nn.Linear, Tensor, Tensor, int], Tensor]
Run = tuple[LossOf, nn.Linear, Tensor, Tensor, int]


def unfused(head: nn.Linear, hidden: Tensor, labels: Tensor, _chunk: int) -> Tensor:
    """All logits at once."""
    return CrossEntropy()(head(hidden).unsqueeze(0), labels.unsqueeze(0)).total


def recomputed(head: nn.Linear, hidden: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Chunks under activation checkpointing: the head runs once more in the backward pass."""
    pairs = zip(hidden.split(chunk), labels.split(chunk), strict=True)
    losses = [checkpoint(unfused, head, *pair, chunk, use_reentrant=False) for pair in pairs]
    return torch.stack(losses).sum()


def of_torch(head: nn.Linear, hidden: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """torch's chunked loss."""
    options = nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=chunk)
    return F.linear_cross_entropy(hidden, head.weight, labels, reduction="sum", options=options)


def ours(head: nn.Linear, hidden: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Our fused head."""
    task = LossTask(CrossEntropy(), labels.unsqueeze(0), (), FULL_VOCABULARY, chunk)
    total: Tensor = head(hidden.unsqueeze(0), task=task)[0]
    return total


WAYS: dict[str, tuple[LossOf, bool]] = {
    "unfused": (unfused, False),
    "chunks, recomputed": (recomputed, False),
    "F.linear_cross_entropy": (of_torch, False),
    "ours": (ours, False),
    "ours, compiled": (ours, True),
}


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--chunk", type=int, default=2048, help="rows whose logits exist at a time")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    hidden, labels, heads = setup(arguments)
    runs: dict[str, Run] = {name: (way[0], heads[name], hidden, labels, arguments.chunk) for name, way in WAYS.items()}
    exact = gradients(unfused, copy.deepcopy(heads["unfused"]).double(), hidden.detach().double(), labels, 0)
    about = {name: [*memory(name, runs[name]), *errors(gradients(*runs[name]), exact)] for name in WAYS}
    took: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            took[name].append(seconds(run))
    print(f"| | {' | '.join(COLUMNS)} |\n|{'---|' * (1 + len(COLUMNS))}")
    for name, texts in about.items():
        ratios = [mine / base for mine, base in zip(took[name], took["unfused"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        times = [f"{middle:.3f} ({low:.3f} - {high:.3f})", f"{statistics.median(took[name]):.2f}"]
        print(f"| {name} | {' | '.join(times + texts)} |")


def setup(arguments: argparse.Namespace) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Hidden states [R, D], labels [R], and a head for each way, all with the same weights."""
    torch.manual_seed(0)
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", DTYPES[arguments.dtype]
    hidden = torch.randn(arguments.rows, arguments.features, device=device).to(dtype).requires_grad_()
    labels = torch.randint(arguments.vocabulary, (arguments.rows,), device=device)
    head = nn.Linear(arguments.features, arguments.vocabulary, bias=False, device=device, dtype=dtype)
    heads: dict[str, Any] = {name: copy.deepcopy(head) for name in WAYS}
    for name, (loss_of, compiled) in WAYS.items():
        if loss_of is ours:
            fuse_head(heads[name])
            heads[name].compiled = torch.compile(loss_and_gradient, fullgraph=True, dynamic=False) if compiled else None
    return hidden, labels, heads


def gradients(loss_of: LossOf, head: nn.Linear, hidden: Tensor, labels: Tensor, chunk: int) -> list[Tensor]:
    """The loss, and its gradients with respect to hidden states and weight."""
    hidden.requires_grad_()
    loss = loss_of(head, hidden, labels, chunk)
    return [loss.detach(), *torch.autograd.grad(loss, [hidden, head.weight])]


def memory(name: str, run: Run) -> list[str]:
    """Elements of the largest new tensor, and bytes alive between the passes."""
    if WAYS[name][1]:  # torch compiles nothing while operators are recorded
        return ["-", "-"]
    hidden, head = run[2], run[1]
    with AllocationRecorder() as recorder:
        loss = run[0](*run[1:])
        kept = recorder.alive_bytes
        loss.backward()
    hidden.grad = head.weight.grad = None
    return [f"{recorder.largest / 1e6:.1f} M", f"{kept / 2**20:.0f} MiB"]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[str]:
    """Relative, of whole tensors."""
    pairs = zip(found, expected, strict=True)
    return [f"{float((mine.double() - exact).norm() / exact.norm()):.1e}" for mine, exact in pairs]


def seconds(run: Run) -> float:
    """Forward and backward pass."""
    begin = time.perf_counter()
    gradients(*run)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
