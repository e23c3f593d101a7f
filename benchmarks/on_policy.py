"""On-policy distillation against the same run on data alone: cost of a step, and the student afterwards, by seed.

    python -m benchmarks.on_policy --config demo/student.json --out out/on-policy --seeds 1 2 3 --fraction 0.5 \\
      --prompt-tokens 32 --new-tokens 64 --set run.steps=300

For every seed two runs of `headrace distill`, one process each, with and without `distill.on_policy`; both have the
same order of the data. Finished runs are not repeated. Then, by transformers, from the exported student and the
teacher, both at temperature 1:

    held-out             cross-entropy, KL(teacher, student) and KL(student, teacher) on held-out windows
    own generations      both divergences on tokens that the student samples after held-out prompts
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.distillation_seeds import T_95, interval
from pipeline.config.load import read_config
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.data.loader import heldout_batches
from pipeline.data.mixing_weights import Extent
from pipeline.data.mixture import open_heldout, open_mixture
from pipeline.models.folder.loading import load_model
from pipeline.runtime.metrics.journal import read_rows

FIGURES = ("cross-entropy", "KL(t, s)", "KL(s, t)", "own KL(t, s)", "own KL(s, t)", "s per step", "generation")
GENERATED_AT = 1234
"""Seed of torch's generator for the samples that both students are measured on."""


@dataclass(frozen=True)
class Prompted:
    """How samples begin and how long they are.

    Attributes:
        prompt: tokens.
        new: tokens.
        windows: held-out windows, and prompts.
    """

    prompt: int
    new: int
    windows: int


def main() -> None:
    """Prints the tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="config of a distillation")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--fraction", type=float, default=0.5)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--windows", type=int, default=256, help="held-out windows, and prompts")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of both runs; repeatable")
    given = parser.parse_args()
    if len(given.seeds) > len(T_95) + 1:
        parser.error(f"at most {len(T_95) + 1} seeds")
    prompted = Prompted(given.prompt_tokens, given.new_tokens, given.windows)
    generation = f"fraction={given.fraction}", f"prompt_tokens={prompted.prompt}", f"new_tokens={prompted.new}"
    on_policy = tuple(f"distill.on_policy.{each}" for each in generation)
    found = {
        name: [measured(given, seed, name, sets, prompted) for seed in given.seeds]
        for name, sets in (("data", ()), ("on-policy", on_policy))
    }
    print_tables(given.seeds, found)


def measured(
    given: argparse.Namespace, seed: int, name: str, sets: Sequence[str], prompted: Prompted
) -> dict[str, float]:
    """The figures of one run, which is made unless it is finished."""
    run_dir = given.out / f"{name}-{seed}"
    fields = (f"run.dir={run_dir}", f"run.seed={seed}", "engine=torch", "zero_optimization.stage=2", *given.set, *sets)
    words = ["--config", given.config, *(word for field in fields for word in ("--set", field))]
    command = [sys.executable, "-m", "headrace"]
    subprocess.run([*command, "distill", *words], check=True, stdout=sys.stderr)
    if not (run_dir / "model").exists():
        subprocess.run([*command, "export", run_dir, run_dir / "model"], check=True, stdout=sys.stderr)
    run = resolve(read_config(given.config, list(fields)).config, world_size=1)
    assert run.config.distill is not None
    assert run.config.distill.teacher is not None
    student, teacher = (
        load_model(Path(each), dtype=torch.float32) for each in (run_dir / "model", run.config.distill.teacher)
    )
    rows = [row for row in read_rows(run_dir, kind="step") if row["step"] > 1]
    share = [row.get("generation_share", 0.0) for row in rows]
    return {
        **qualities(student, teacher, run, prompted),
        "s per step": statistics.median(row["seconds"] for row in rows),
        "generation": statistics.median(share),
    }


@torch.no_grad()
def qualities(student: Any, teacher: Any, run: ResolvedRun, prompted: Prompted) -> dict[str, float]:
    """Means over tokens, in nats."""
    held, own = torch.zeros(3, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    targets = sampled = 0
    torch.manual_seed(GENERATED_AT)
    for ids, labels in windows(run, prompted.windows):
        logs = [torch.log_softmax(model(ids).logits, -1) for model in (teacher, student)]
        ce = -logs[1].gather(-1, labels[..., None]).sum().double()
        held += torch.stack([ce, *divergences(*logs)])
        targets += labels.numel()
        generated = student.generate(
            ids[:, : prompted.prompt], do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
            min_new_tokens=0, max_new_tokens=prompted.new, pad_token_id=0,
        )  # fmt: skip
        new = slice(prompted.prompt - 1, -1)
        ends = (generated[:, prompted.prompt :] == student.config.eos_token_id).long()
        counts = ends.cumsum(1) <= ends  # the token that ends the text counts, those after it do not
        logs = [torch.log_softmax(model(generated).logits[:, new], -1)[counts] for model in (teacher, student)]
        own += torch.stack(list(divergences(*logs)))
        sampled += int(counts.sum())
    means = [*(held / targets).tolist(), *(own / sampled).tolist()]
    return dict(zip(FIGURES, means, strict=False))


def divergences(log_p: Tensor, log_q: Tensor) -> Iterator[Tensor]:
    """KL(p, q) and KL(q, p), summed over positions."""
    yield (log_p.exp() * (log_p - log_q)).sum().double()
    yield (log_q.exp() * (log_q - log_p)).sum().double()


def windows(run: ResolvedRun, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and labels of held-out windows."""
    mixture = open_mixture(run.config.data, seed=run.config.run.seed, extent=Extent(run.steps, run.batch.samples))
    for dataset in open_heldout(run.config.data, mixture):
        for batch in heldout_batches(dataset, batch_size=32, dp=1, dp_rank=0, samples=count):
            yield batch.input_ids, batch.labels


def print_tables(seeds: Sequence[int], found: dict[str, list[dict[str, float]]]) -> None:
    """Every run, and the mean differences."""
    print(f"| seed | samples | {' | '.join(FIGURES)} |\n|---|---|{'---|' * len(FIGURES)}")
    for index, seed in enumerate(seeds):
        for name, runs in found.items():
            print(f"| {seed} | {name} | {' | '.join(f'{runs[index][figure]:.4f}' for figure in FIGURES)} |")
    if len(seeds) < 2:
        return
    print("\n| figure | on-policy - data | 95 % interval |\n|---|---|---|")
    for figure in FIGURES:
        pairs = zip(found["on-policy"], found["data"], strict=True)
        mean, half = interval([after[figure] - before[figure] for after, before in pairs])
        print(f"| {figure} | {mean:+.4f} | {mean - half:+.4f} to {mean + half:+.4f} |")


if __name__ == "__main__":
    main()
