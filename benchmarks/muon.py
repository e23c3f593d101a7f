"""Benchmark of Muon's update on several ranks of a CPU: its share of a step, against AdamW.

    python -m benchmarks.muon [--ranks 4] [--steps 6] [--hidden 256] [--tokens 8192]

Engine torch with FSDP2 (stage 3, gloo) trains the same model in one launch, alternating between AdamW and Muon, whose
matrices are divided among the ranks. The table shows medians over steps of the CPU seconds of all ranks together: of
the whole step, and of the optimizer's update. Other work on the machine does not change CPU seconds. The slowest rank's
wall-clock times stand beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import (
    Seconds,
    alternate,
    cpu_engine,
    llama,
    make_parser,
    on_ranks,
    print_head,
    print_load,
    print_row,
    ratio,
)
from pipeline.data.micro_batch import MicroBatch, StepBatch

VOCABULARY, LENGTH, WARM_UP = 1024, 256, 2
KINDS = ("adamw", "muon")
Steps = dict[str, list[tuple[Seconds, Seconds]]]
"""Kind -> time of each step, and of the optimizer's update in it."""


def main() -> None:
    """Runs the benchmark and prints its results."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each kind")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size; the MLP has three times as many features")
    parser.add_argument("--tokens", type=int, default=8192, help="per step, over all ranks")
    arguments = parser.parse_args()
    print_load()
    times, facts = on_ranks(measure, arguments.ranks, arguments)
    print(f"{arguments.ranks} ranks, {facts}\n")
    print_head("", "CPU s", "of AdamW's step", "clock, s")
    plain = [step.cpu for step, _ in times["adamw"]]
    for kind, found in times.items():
        for name, each in zip(("step", "update"), zip(*found, strict=True), strict=True):
            wall, cpu = zip(*each, strict=True)
            print_row(f"{kind}, {name}", f"{median(cpu):.3f}", ratio(cpu, plain), f"{median(wall):.3f}")
    print_load()


def measure(_rank: int, arguments: argparse.Namespace) -> tuple[Steps, str]:
    """Times steps of all kinds alternately; also returns a description of the training."""
    engines = {kind: _Timed(kind, arguments) for kind in KINDS}
    times = alternate({kind: each.step for kind, each in engines.items()}, arguments.steps, warmup=WARM_UP)
    own = engines["muon"]
    return times, (
        f"{own.parameters / 1e6:.2f}M parameters, {own.matrices:.0%} of them in matrices, hidden size"
        f" {arguments.hidden}, {arguments.tokens:,} tokens per step, fp32; work of the busiest rank over the mean:"
        f" {max(own.shares) / (sum(own.shares) / len(own.shares)):.3f}"
    )


def _collective(work: Callable[[], object]) -> Seconds:
    """Times work of all ranks: the slowest rank's wall-clock time, and the CPU seconds of all together."""
    dist.barrier()  # waiting is not a rank's own work
    wall, cpu = (torch.tensor(each, dtype=torch.float64) for each in Seconds.of(work))
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return Seconds(float(wall), float(cpu))


class _Timed:
    """An engine with timed steps and updates.

    Args:
        kind: One of `KINDS`.
        arguments: The command line.
    """

    def __init__(self, kind: str, arguments: argparse.Namespace) -> None:
        self._arguments, self._number = arguments, 0
        model, self._engine = cpu_engine(_config(kind, arguments), arguments.ranks)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.matrices = sum(model.get_parameter(name).numel() for name in self._engine._matrices) / self.parameters
        optimizer = self._engine._optimizer
        self.shares: list[float] = []
        if kind == "muon":
            self.shares = optimizer._exchange.shares(range(len(optimizer._index)))
        self._update, update = Seconds(0, 0), optimizer.step

        def timed_update() -> None:
            self._update = _collective(update)

        optimizer.step = timed_update

    def step(self) -> tuple[Seconds, Seconds]:
        """Trains a step of random tokens; returns its time and its update's."""
        self._number += 1
        batch = _batch(self._arguments, self._number)
        return _collective(lambda: self._engine.train_step(batch, lr=1e-3)), self._update


def _config(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "engine": "torch",
        "model": llama(hidden=arguments.hidden, layers=4, vocab_size=VOCABULARY),
        "data": {"sources": [{"path": "none"}], "sequence_length": LENGTH},
        "train_batch_size": arguments.tokens // LENGTH,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW" if kind == "adamw" else "Muon", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "run": {"dir": "none", "steps": 100},
    }


def _batch(arguments: argparse.Namespace, step: int) -> StepBatch:
    generator = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
    samples = arguments.tokens // LENGTH // arguments.ranks
    rows = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=generator)
    return StepBatch(step, [MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())], arguments.tokens)


if __name__ == "__main__":
    main()
