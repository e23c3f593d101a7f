"""Expert parallelism on CPUs with gloo: against FSDP2's gathering, grouped products against a loop, cost of imbalance.

    python -m benchmarks.experts [--ranks 4] [--rounds 7] [--only layouts,overlap,products,imbalance]

Everything is measured in turns in one run, and printed as ratios of times (median and quartiles of the rounds).

- layouts: training steps of a mixture (`MODEL`) by FSDP2 at stage 3, with ep 1, 2 and all ranks, on the same ranks.
- overlap: training steps of four micro-batches at stage 2 with ep over all ranks, whose layers wait for the exchange,
  and with `parallel.ep_overlap`.
- products: the experts of one layer on one process, forward and backward, by one grouped product and by transformers'
  loop over the experts.
- imbalance: one layer over all ranks, with rows that are even over the experts, that follow Zipf's law, and that all go
  to one expert.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from benchmarks.harness import Seconds, alternate, make_parser, on_ranks, print_head, print_load, print_row, ratio
from headrace.base.section import parse
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config
from pipeline.data.micro_batch import MicroBatch, StepBatch
from pipeline.engines.build import build_engine
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.experts import apply_expert_parallel, expert_modules
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.construction.initial_values import InitByName
from pipeline.models.construction.meta import build_meta

SEQUENCE, SAMPLES = 256, 2
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 2,
    "vocab_size": 512,
}  # fmt: skip
"""The experts are 97 % of its parameters."""
MICRO_BATCHES = 4
"""Of a step that overlaps their exchange."""
EXPERTS = (8, 64, 128)
ROUTINGS = ("even", "Zipf", "all to one")

Times = dict[str, list[Seconds]]


def main() -> None:
    """Prints a table in Markdown for each measurement."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="layouts,overlap,products,imbalance")
    arguments = parser.parse_args()
    print_load()
    only = arguments.only.split(",")
    if "products" in only:
        for experts in EXPERTS:
            show(f"{experts} experts", products(experts, arguments.rounds))
    for name, measure in (("layouts", layouts), ("overlap", overlap), ("imbalance", imbalance)):
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
    """Times all candidates, on all ranks at once where there are several."""
    barrier = dist.barrier if dist.is_initialized() else lambda: None
    return alternate({name: lambda run=run: Seconds.of(run) for name, run in runs.items()}, rounds, before=barrier)


def layouts(rank: int, ranks: int, rounds: int) -> Times:
    """Steps with experts gathered by FSDP2, and with expert parallelism."""
    sizes = sorted({1, 2, ranks})
    return in_turns({f"ep {ep}": _stepper(rank, ranks, stage=3, ep=ep) for ep in sizes}, rounds)


def overlap(rank: int, ranks: int, rounds: int) -> Times:
    """Steps whose layers wait for the exchange, and with the exchange beside another micro-batch."""
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
    run = resolve(parse(Config, config), world_size=ranks)
    model = build_meta(AutoConfig.for_model(**MODEL), dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    values = InitByName(model, seed=0)
    engine: Any = build_engine(run, model, values, CrossEntropy(), device=torch.device("cpu"))

    def step() -> None:
        batches = [MicroBatch(ids, ids)] * micro_batches
        engine.train_step(StepBatch(1, batches, micro_batches * ranks * ids.numel()), lr=1e-4)

    return step


def products(experts: int, rounds: int) -> Times:
    """One layer's experts on one process: transformers' loop, and one grouped product."""
    inputs = _routed("even", experts, tokens=SAMPLES * SEQUENCE, seed=0)
    return in_turns({name: _passes(_layer(experts, name), *inputs) for name in ("eager", "grouped")}, rounds)


def imbalance(rank: int, ranks: int, rounds: int) -> Times:
    """One layer over all ranks, with three routings."""
    layer, experts = _layer(MODEL["num_experts"], "grouped", dist.group.WORLD), MODEL["num_experts"]
    assert ranks > 1
    inputs = {name: _routed(name, experts, tokens=SAMPLES * SEQUENCE, seed=rank) for name in ROUTINGS}
    return in_turns({name: _passes(layer, *each) for name, each in inputs.items()}, rounds)


def _layer(experts: int, how: str, group: Any = None) -> Any:
    config = AutoConfig.for_model(**{**MODEL, "num_experts": experts, "num_hidden_layers": 1})
    model = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    [(name, module)] = expert_modules(model)
    if how == "eager":
        config._experts_implementation = "eager"
        module.config._experts_implementation = "eager"
    else:
        apply_expert_parallel(model, group, names={id(p): f"{name}.{key}" for key, p in module.named_parameters()})
    for key, parameter in list(module.named_parameters()):
        module._parameters[key] = torch.nn.Parameter(torch.randn(parameter.shape) * 0.02)
    return module


def _routed(how: str, experts: int, *, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, chosen experts and weights of a rank's tokens."""
    generator = torch.Generator().manual_seed(seed)
    each = MODEL["num_experts_per_tok"]
    weights = {"even": torch.ones(experts), "Zipf": 1.0 / torch.arange(1, experts + 1)}
    if how == "all to one":
        chosen = torch.zeros(tokens, each, dtype=torch.int64)
    else:
        chosen = torch.multinomial(weights[how].expand(tokens, -1), each, generator=generator)
    hidden = torch.randn(tokens, MODEL["hidden_size"], generator=generator).requires_grad_()
    return hidden, chosen, torch.rand(tokens, each, generator=generator).requires_grad_()


def _passes(layer: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Callable[[], None]:
    def run() -> None:
        layer(hidden, chosen, weights).sum().backward()

    return run


if __name__ == "__main__":
    main()
