"""Expert parallelism on CPUs with gloo: against FSDP2's gathers, and with the exchange beside another micro-batch.

    python -m benchmarks.experts [--ranks 4] [--rounds 7] [--only layouts,overlap]

The tables show ratios of times. b1b88214 also measures grouped products and the cost of an imbalance.

- layouts: training steps of a mixture of experts (`MODEL`) by FSDP2 at stage 3, with ep 1, 2 and all ranks, on the same
  ranks.
- overlap: training steps of four micro-batches at stage 2 with ep over all ranks: layers wait for the exchange, or it
  runs beside another micro-batch (`parallel.ep_overlap`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import (
    Seconds,
    alternate,
    cpu_engine,
    make_parser,
    on_ranks,
    print_head,
    print_load,
    print_row,
    ratio,
)
from pipeline.data.micro_batch import MicroBatch, StepBatch

SEQUENCE, SAMPLES = 256, 2
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 2,
    "vocab_size": 512,
}  # fmt: skip
"""Config of a model whose experts have 97 % of the parameters."""
MICRO_BATCHES = 4
"""Number of micro-batches in a step that overlaps their exchange."""

Times = dict[str, list[Seconds]]


def main() -> None:
    """Prints a table in Markdown for each measurement."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="layouts,overlap")
    arguments = parser.parse_args()
    print_load()
    only = arguments.only.split(",")
    for name, measure in (("layouts", layouts), ("overlap", overlap)):
        if name in only:
            times = on_ranks(measure, arguments.ranks, arguments.ranks, arguments.rounds)
            show(f"{name}, {arguments.ranks} ranks", times)


def show(title: str, times: Times) -> None:
    """Prints times, and their ratios to the first candidate's."""
    walls = {name: [each.wall for each in found] for name, found in times.items()}
    base, *_ = walls.values()
    print_head(title, "time against the first", "ms")
    for name, each in walls.items():
        print_row(name, ratio(each, base), f"{1e3 * statistics.median(each):.1f}")


def in_turns(runs: dict[str, Callable[[], None]], rounds: int) -> Times:
    """Times all candidates, on all ranks at once."""
    return alternate({name: lambda run=run: Seconds.of(run) for name, run in runs.items()}, rounds, before=dist.barrier)


def layouts(rank: int, ranks: int, rounds: int) -> Times:
    """Times steps with experts gathered by FSDP2, and with expert parallelism."""
    sizes = sorted({1, 2, ranks})
    return in_turns({f"ep {ep}": _stepper(rank, ranks, stage=3, ep=ep) for ep in sizes}, rounds)


def overlap(rank: int, ranks: int, rounds: int) -> Times:
    """Times steps whose layers wait for the exchange, and steps with the exchange beside another micro-batch."""
    ways = {"layers wait for the exchange": False, "beside another micro-batch": True}
    steps = {
        name: _stepper(rank, ranks, stage=2, micro_batches=MICRO_BATCHES, ep=ranks, ep_overlap=beside)
        for name, beside in ways.items()
    }
    return in_turns(steps, rounds)


def _stepper(rank: int, ranks: int, *, stage: int, micro_batches: int = 1, **parallel: Any) -> Callable[[], None]:
    ids = torch.randint(MODEL["vocab_size"], (SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(rank))
    config = {
        "engine": "torch",
        "model": {"config": MODEL},
        "data": {"sources": [{"path": "none"}], "sequence_length": SEQUENCE},
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": {"stage": stage},
        "parallel": parallel,
        "run": {"dir": "none", "steps": 100},
    }
    _, engine = cpu_engine(config, ranks)

    def step() -> None:
        batches = [MicroBatch(ids, ids)] * micro_batches
        engine.train_step(StepBatch(1, batches, micro_batches * ranks * ids.numel()), lr=1e-4)

    return step


if __name__ == "__main__":
    main()
