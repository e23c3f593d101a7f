"""Measures the difference of each layout from one plain PyTorch process: the table of docs/reference/parity.md.

    python -m benchmarks.parity [--steps 20] [--only torch]

It trains a model of 3.2M parameters (ds_configs/zero3.json, with heads and vocabulary that 4 ranks divide) on synthetic
tokens, 16 samples of 64 tokens per step, in fp32 and in bf16. The table shows the largest relative differences of a
step's loss, of a step's gradient norm, and of a tensor of the first gradient. In bf16 it has only the first step's
norm, and adds the difference of bf16 itself from fp32. It takes some minutes on two cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import make_parser, print_head, print_row, work_folder
from foundation.configfile import load, merge
from pipeline.plan.proof.case import Case, CaseResult
from pipeline.plan.proof.compare import first_gradient, relative_differences
from pipeline.plan.proof.equivalence import ProofResult, check_equivalence
from pipeline.plan.proof.shrunk_run import reference_config, with_precision
from pipeline.plan.proof.tokens import write_tokens
from pipeline.plan.proof.worker import run_cases

ZERO3 = Path(__file__).resolve().parent.parent / "ds_configs/zero3.json"

Layout = tuple[str, int, str, dict[str, Any]]


def layout(name: str, engine: str, stage: int, ranks: int = 2, **fields: Any) -> Layout:
    """Makes a layout from name, ranks, engine and fields; `fields` belong to `parallel`, or are whole sections."""
    zero, sections = fields.pop("zero", {}), {key: fields.pop(key) for key in ("memory", "loss") if key in fields}
    return name, ranks, engine, {"zero_optimization": {"stage": stage, **zero}, "parallel": fields, **sections}


OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
LAYOUTS: list[Layout] = [
    *(layout(f"ZeRO-{stage}, dp 2", "deepspeed", stage) for stage in range(4)),
    layout("ZeRO-1, tp 2 x dp 2", "deepspeed", 1, 4, tp=2),
    layout("ZeRO-3, tp 2 x dp 2", "deepspeed", 3, 4, tp=2),
    layout("ZeRO-3, cp 2 x dp 2", "deepspeed", 3, 4, cp=2),
    layout("ZeRO-1, pp 2 x dp 2", "deepspeed", 1, 4, pp=2),
    layout("ZeRO-1, pp 2 x dp 2 x tp 2", "deepspeed", 1, 8, pp=2, tp=2),
    layout("ZeRO-3, dp 2, offload to the CPU", "deepspeed", 3, zero=OFFLOAD),
    layout("DDP, dp 2", "torch", 0),
    layout("FSDP2 as ZeRO-2, dp 2", "torch", 2),
    layout("FSDP2, dp 2", "torch", 3),
    layout("HSDP, 2 replicas of 2 shards", "torch", 3, 4, hybrid_shard_size=2),
    layout("FSDP2, tp 2 x dp 2", "torch", 3, 4, tp=2),
    layout("FSDP2, ulysses 2 x dp 2", "torch", 3, 4, cp=2),
    layout("FSDP2, ring 2 x dp 2", "torch", 3, 4, cp=2, cp_method="ring"),
    layout("FSDP2, pp 2 (1f1b) x dp 2", "torch", 3, 4, pp=2),
    layout("FSDP2 as ZeRO-2, pp 2 (zero_bubble) x dp 2", "torch", 2, 4, pp=2, schedule="zero_bubble"),
    layout("FSDP2, pp 2 x dp 2 x tp 2", "torch", 3, 8, pp=2, tp=2),
    layout(
        "FSDP2, pp 2 (interleaved) x cp 2 x tp 2, full activation checkpointing, chunked loss",
        "torch",
        3,
        8,
        pp=2,
        cp=2,
        tp=2,
        schedule="interleaved_1f1b",
        memory={"activation_checkpointing": "full"},
        loss={"chunk": 24},
    ),
]


def base(tokens: Path, steps: int) -> dict[str, Any]:
    """The config that all layouts share."""
    config = load(ZERO3)
    for key in ("evaluation", "scheduler", "zero_optimization", "train_micro_batch_size_per_gpu"):
        config.pop(key)
    model = {**config["model"]["config"], "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024}
    return {
        **config,
        "model": {"config": model},
        "data": {"sources": [{"path": str(tokens)}], "sequence_length": 64},
        "gradient_accumulation_steps": 2,
        "parallel": {"elastic": False},
        "run": {"dir": "replaced", "steps": steps, "seed": 1},
    }


def main() -> None:
    """Prints the table in Markdown."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", metavar="TEXT", help="layouts whose engine or name has this text")
    arguments = parser.parse_args()
    chosen = [row for row in LAYOUTS if arguments.only in f"{row[2]}, {row[0]}"]
    with work_folder() as work:
        tokens = write_tokens(work / "tokens", vocab_size=1024, tokens=60_000, longest=200)
        shared = base(tokens, arguments.steps)
        cases: dict[str, Case] = {}
        for precision in ("fp32", "bf16"):
            reference = reference_config(with_precision(shared, precision), dp=2)
            cases[f"reference {precision}"] = Case(f"reference {precision}", reference)
            for name, ranks, engine, fields in chosen:
                config = with_precision(merge(shared, {"engine": engine, **fields}), precision)
                cases[f"{name} {precision}"] = Case(f"{name} {precision}", config, ranks)
        found = run_cases(list(cases.values()), work)
        table(cases, found, chosen)


def table(cases: dict[str, Case], found: dict[str, CaseResult], chosen: list[Layout]) -> None:
    """One row per layout and precision."""
    known = {name: (case, found[name]) for name, case in cases.items()}
    fp32, bf16 = known["reference fp32"], known["reference bf16"]
    bf16_error = relative_differences(first_gradient(*bf16), first_gradient(*fp32))
    print_head("dtype", "engine", "layout", "loss", "gradient norm", "first gradient", "seconds")
    for precision, reference in (("fp32", fp32), ("bf16", bf16)):
        if precision == "bf16":
            losses = max(abs(bf16[1].losses[s] - x) / x for s, x in fp32[1].losses.items())
            norm = abs(bf16[1].grad_norms[1] - fp32[1].grad_norms[1]) / fp32[1].grad_norms[1]
            figures = (f"{each:.1e}" for each in (losses, norm, max(bf16_error.values())))
            print_row("bf16", "", "(bf16 against fp32)", *figures, "")
        for name, _, engine, _ in chosen:
            case = known[f"{name} {precision}"]
            result = check_equivalence(case, reference, fp32_reference=fp32)
            print_row(precision, engine, name, cells(result), f"{case[1].seconds:.0f}")


def cells(result: ProofResult) -> str:
    """The three differences; bold if out of tolerance."""
    if result.error is not None or result.gradient is None:
        return f"failed: {str(result.error).splitlines()[-1]} | |"
    by_quantity = {each.quantity: each for each in result.comparisons}
    formatted = [
        f"{each.difference:.1e}" if each.passed else f"**{each.difference:.1e}**"
        for each in (by_quantity["loss"], by_quantity["gradient norm"])
    ]
    largest = f"{max(result.gradient.values()):.1e}"
    return " | ".join([*formatted, largest if not result.wrong_gradients() else f"**{largest}**"])


if __name__ == "__main__":
    main()
