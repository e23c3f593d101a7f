"""`python -m pipeline prove --config F`: this config's layout, made small, against one plain process.

The same layout and features with the model's sizes shrunk run on CPU processes of this machine. Gradient by gradient,
loss by loss and norm by norm they are compared with one plain PyTorch process; always in fp32, which shows the layout
itself, and in the config's own precision.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.cli import add_config_arguments
from headrace.base.errors import ConfigError
from pipeline.config.load import load_config
from pipeline.config.rules import ResolvedRun, resolve
from pipeline.config.schema import Config

if TYPE_CHECKING:
    from pipeline.proof.case import Case, CaseResult
    from pipeline.proof.judgement import ProofResult
    from pipeline.proof.small import Small

PROVEN, REFUTED = 0, 1
READ_BY_REFERENCE = "loss, its state in one process"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m pipeline prove`."""
    add_config_arguments(parser)
    parser.add_argument(
        "--processes", type=int, metavar="N", help="of the real run (default: the fewest that use every axis)"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of each run (default: 20)")
    parser.add_argument("--gradients", action="store_true", help="print the difference of every tensor's gradient")


def run(arguments: argparse.Namespace) -> int:
    """Proves or refutes; the exit code says which."""
    started = time.monotonic()
    config = load_config(arguments.config, arguments.overrides)
    real = resolve(config, world_size=arguments.processes) if arguments.processes else _fewest(config)
    print(f"{arguments.config}: {real.layout}; {real.precision}", flush=True)
    # torch takes seconds to import, and a refusal should not wait for it
    from pipeline.proof.small import make_small  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="headrace-prove-") as work:
        small = make_small(real, steps=max(2, arguments.steps), work=Path(work))
        for note in small.notes:
            print(f"  {note}")
        verdicts = _prove(small, Path(work), steps=max(2, arguments.steps))
    from pipeline.proof.table import show  # noqa: PLC0415

    show(verdicts, gradients=arguments.gradients)
    proven = all(verdict.holds for verdict in verdicts)
    print(f"{'proven' if proven else 'REFUTED'} in {time.monotonic() - started:.0f} s")
    return PROVEN if proven else REFUTED


def _fewest(config: Config) -> ResolvedRun:
    """The config on the fewest processes that use every axis it has; two data ranks, if the batch allows it."""
    axes = (
        config.parallel.pp or config.pipeline.stages,
        config.parallel.tp or config.tensor_parallel.autotp_size,
        config.parallel.cp or config.sequence_parallel_size,
    )
    model_ranks = 1
    for size in axes:
        model_ranks *= size or 1
    keys = (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    derived = []
    if config.train_batch_size and all(keys):
        derived = [max(1, config.train_batch_size // ((keys[0] or 1) * (keys[1] or 1)))]
    shard = [2 * config.parallel.hybrid_shard_size] if config.parallel.hybrid_shard_size else []
    refused: ConfigError | None = None
    for dp in [*derived, *shard, 2, 4, 8, 1]:
        try:
            return resolve(config, world_size=model_ranks * dp)
        except ConfigError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _prove(small: Small, work: Path, *, steps: int) -> list[ProofResult]:
    from pipeline.proof.compare import RESUMED  # noqa: PLC0415
    from pipeline.proof.judgement import judge  # noqa: PLC0415
    from pipeline.proof.small import SEQUENCE, VOCABULARY  # noqa: PLC0415
    from pipeline.proof.tokens import write_tokens  # noqa: PLC0415
    from pipeline.proof.worker import run_cases  # noqa: PLC0415

    tokens = write_tokens(work / "tokens", vocab_size=VOCABULARY, tokens=16_000, longest=2 * SEQUENCE)
    precisions = ["fp32"] if small.precision == "fp32" else ["fp32", small.precision]
    saved = (1, steps // 2)
    cases: list[Case] = []
    for p in precisions:
        cases.append(small.reference(f"reference-{p}", precision=p, tokens=tokens, save=saved))
        # what the reference wrote, the layout reads, and the other way round
        again = (cases[-1].name, saved[1])
        cases.append(small.layout(f"layout-{p}", precision=p, tokens=tokens, save=saved, again=again))
    cases.append(replace(cases[0], name="resumed-fp32", again=("layout-fp32", saved[1])))
    print(f"  {small.topology}, {steps} steps in {' and '.join(precisions)}", flush=True)
    outcomes = run_cases(cases, work, told=_tell)
    known = {case.name: (case, outcomes[case.name]) for case in cases}
    exact = known["reference-fp32"]
    verdicts = [judge(known[f"layout-{p}"], known[f"reference-{p}"], exact=exact) for p in precisions]
    resumed = judge(known["resumed-fp32"], exact, exact=exact)
    others = [replace(gap, what=READ_BY_REFERENCE) for gap in resumed.gaps if gap.what == RESUMED]
    first = verdicts[0]
    return [replace(first, gaps=(*first.gaps, *others), failed=first.failed or resumed.failed), *verdicts[1:]]


def _tell(case: Case, outcome: CaseResult) -> None:
    print(f"  {case.name:<16} {case.processes:>2} processes {outcome.seconds:6.1f} s", flush=True)
