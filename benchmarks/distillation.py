"""The loss of a distillation, chunked and whole, side by side: peak memory and time of head, divergence and gradients.

    python -m benchmarks.distillation --rows 4096 --features 512 --teacher-features 1024 --vocabulary 32768

The parts of a step that differ: from the last hidden states of student and teacher to the gradients of the student's
hidden states and head. Each way runs in a process of its own, whose peak of resident memory (on a GPU: of allocated
memory) is counted from before its first step; times are medians of rounds. `autograd` is what a training loop without
a fused loss does: both logits, torch's kl_div and cross_entropy, and autograd.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.sections.compression import DistillSection
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.parallel.fused_head import LossTask, fuse_head
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard
from pipeline.run.distillation.divergence import Divergence, divergence_and_gradient
from pipeline.run.distillation.objective import Distillation

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TEMPERATURE, ALPHA = 2.0, 0.5
Step = Callable[[nn.Linear, nn.Linear, Tensor, Tensor, Tensor], Tensor]
"""(student's head, teacher's head, student's and teacher's hidden states, labels) -> loss."""


class HeadOnly:
    """A teacher of whom only the head is computed."""

    def __init__(self, head: nn.Linear, hidden: Tensor) -> None:
        self._head, self._hidden = head, hidden

    def targets(self, _batch: MicroBatch) -> tuple[Tensor, ...]:
        """Its hidden states [1, R, D']."""
        return (self._hidden.unsqueeze(0),)

    @torch.no_grad()
    def compare(
        self, divergence: Divergence, logits: Tensor, labels: Tensor, *targets: Tensor, vocabulary: VocabularyShard
    ) -> tuple[Tensor, Tensor]:
        """See `distillation.objective.Reference`."""
        return divergence_and_gradient(divergence, self._head(targets[0]), logits, labels, vocabulary)


def autograd(head: nn.Linear, teacher: nn.Linear, hidden: Tensor, its_hidden: Tensor, labels: Tensor) -> Tensor:
    """Both logits whole, by torch's own functions."""
    with torch.no_grad():
        target = F.log_softmax(teacher(its_hidden).float() / TEMPERATURE, dim=-1)
    logits = head(hidden).float()
    kl = F.kl_div(F.log_softmax(logits / TEMPERATURE, dim=-1), target, log_target=True, reduction="sum")
    return ALPHA * TEMPERATURE**2 * kl + (1 - ALPHA) * F.cross_entropy(logits, labels, reduction="sum")


def ours(divergence: str, chunk: int | None) -> Step:
    """The objective of this project, of all rows at once or chunk by chunk."""

    def step(head: nn.Linear, teacher: nn.Linear, hidden: Tensor, its_hidden: Tensor, labels: Tensor) -> Tensor:
        section = DistillSection(
            teacher="it",
            divergence=divergence,  # type: ignore[arg-type]
            temperature=TEMPERATURE,
            alpha=ALPHA,
        )
        objective = Distillation(section, HeadOnly(teacher, its_hidden))
        targets = (its_hidden.unsqueeze(0),)
        if chunk is None:
            return objective(head(hidden).unsqueeze(0), labels.unsqueeze(0), *targets).total
        fuse_head(head)
        total: Tensor = head(
            hidden.unsqueeze(0), task=LossTask(objective, labels.unsqueeze(0), targets, FULL_VOCABULARY, chunk)
        )[0]
        return total

    return step


def ways(chunk: int) -> dict[str, Step]:
    """Name -> way."""
    of = {kind: f"{kind}, chunks of {chunk}" for kind in ("forward_kl", "reverse_kl", "jsd")}
    chunked = {name: ours(kind, chunk) for kind, name in of.items()}
    return {"autograd, forward_kl": autograd, "forward_kl, whole": ours("forward_kl", None), **chunked}


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--teacher-features", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--chunk", type=int, default=512, help="rows whose logits exist at a time")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measured(arguments, ways(arguments.chunk)[arguments.way])))
        return
    print("| | peak memory | seconds | loss |\n|---|---|---|---|")
    for name in ways(arguments.chunk):
        command = [sys.executable, "-m", "benchmarks.distillation", *sys.argv[1:], "--way", name]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        print(
            f"| {name} | {found['bytes'] / 2**20:,.0f} MiB | {found['seconds']:.2f} | {found['loss']:.4f} |", flush=True
        )


def measured(arguments: argparse.Namespace, step: Step) -> dict[str, Any]:
    """Peak bytes above those before the first step, median seconds of a step, and the loss per row."""
    torch.manual_seed(0)
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", DTYPES[arguments.dtype]
    hidden = torch.randn(arguments.rows, arguments.features, device=device).to(dtype).requires_grad_()
    its_hidden = torch.randn(arguments.rows, arguments.teacher_features, device=device).to(dtype)
    labels = torch.randint(arguments.vocabulary, (arguments.rows,), device=device)
    head = nn.Linear(arguments.features, arguments.vocabulary, bias=False, device=device, dtype=dtype)
    teacher = nn.Linear(arguments.teacher_features, arguments.vocabulary, bias=False, device=device, dtype=dtype)
    _run(step, head, teacher, hidden[:8], its_hidden[:8], labels[:8])  # what libraries allocate at their first call
    before, times, loss = _peak(), [], 0.0
    for _ in range(arguments.rounds):
        begin = time.perf_counter()
        loss = _run(step, head, teacher, hidden, its_hidden, labels)
        times.append(time.perf_counter() - begin)
    return {"bytes": _peak() - before, "seconds": statistics.median(times), "loss": loss / arguments.rows}


def _run(step: Step, head: nn.Linear, teacher: nn.Linear, hidden: Tensor, its_hidden: Tensor, labels: Tensor) -> float:
    own = hidden.detach().requires_grad_()
    loss = step(head, teacher, own, its_hidden, labels)
    torch.autograd.grad(loss, [own, head.weight])
    return float(loss.detach())


def _peak() -> int:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
