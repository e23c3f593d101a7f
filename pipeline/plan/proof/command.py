"""`python -m pipeline prove --config F`: checks that a config's layout is equivalent to one plain PyTorch process.

The same layout and features run with a shrunk model on CPU processes of this machine. Gradients, losses and gradient
norms are compared with a reference run in one plain PyTorch process: always in fp32, which isolates the layout, and in
the config's own precision.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.cli import add_config_arguments
from foundation.configfile import ConfigTree
from foundation.errors import ConfigError, HeadraceError
from pipeline.config.load import load_config
from pipeline.config.rules.layout import fewest_processes
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config

if TYPE_CHECKING:
    from pipeline.plan.proof.case import Case, CaseResult
    from pipeline.plan.proof.equivalence import ProofResult
    from pipeline.plan.proof.shrunk_run import ShrunkRun

PROVEN, REFUTED, INCONCLUSIVE = 0, 1, 3
READ_BY_REFERENCE = "loss, its state in one process"
"""Name of the loss comparison of the reference after it resumed from the layout's state."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `python -m pipeline prove`."""
    add_config_arguments(parser)
    parser.add_argument(
        "--processes", type=int, metavar="N", help="processes of the real run (default: the fewest that use every axis)"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of each run (default: 20)")
    parser.add_argument("--gradients", action="store_true", help="print the gradient difference of every tensor")


def run(arguments: argparse.Namespace) -> int:
    """Runs the proof; returns PROVEN, REFUTED or INCONCLUSIVE as the exit code.

    Raises:
        ConfigError, DataError: the config cannot run: its layout is neither proven nor refuted.
    """
    started = time.monotonic()
    config = load_config(arguments.config, arguments.overrides)
    real = resolve(config, world_size=arguments.processes) if arguments.processes else on_fewest_processes(config)
    print(f"{arguments.config}: {real.layout}; {real.precision}", flush=True)
    # torch takes seconds to import, and a config error should not wait for it
    from pipeline.plan.proof.preflight import check_run  # noqa: PLC0415
    from pipeline.plan.proof.shrunk_run import shrink_run  # noqa: PLC0415
    from pipeline.plan.proof.table import print_results  # noqa: PLC0415

    results: list[ProofResult] = []
    steps, proven = max(2, arguments.steps), list[ConfigTree]()
    with tempfile.TemporaryDirectory(prefix="headrace-prove-") as work:
        for stage in real.stages or (real,):  # both sides of a border; one process reads what each layout saves
            check_run(stage)
            place = Path(work, str(stage.stage))
            place.mkdir()
            shrunk = shrink_run(stage, steps=steps, work=place)
            if name := stage.accounts.names[stage.stage]:
                known = " is shrunk to the same run as an earlier stage" if shrunk.config in proven else ""
                print(f"stage '{name}'{known or f': {stage.layout}'}", flush=True)
            if shrunk.config in proven:
                continue
            proven.append(shrunk.config)
            for note in shrunk.notes:
                print(f"  {note}")
            found = prove(shrunk, place, steps=steps)
            print_results(found, gradients=arguments.gradients)
            results += found
    verdict, words = _verdict(results)
    print(f"{words} in {time.monotonic() - started:.0f} s")
    return verdict


def _verdict(results: list[ProofResult]) -> tuple[int, str]:
    """The exit code and its word. A quantity whose difference rounding does not explain refutes a layout."""
    if all(result.passed for result in results):
        return PROVEN, "proven"
    if all(result.passed or result.inconclusive for result in results):
        print(
            "The first gradients are equal. The curves differ, but one plain process with noise of the size of\n"
            "rounding on its initial values differs from itself as much: at this learning rate the model is chaotic.\n"
            "  try: fewer steps (--steps 5), or a smaller optimizer.params.lr"
        )
        return INCONCLUSIVE, "INCONCLUSIVE"
    return REFUTED, "REFUTED"


def on_fewest_processes(config: Config) -> ResolvedRun:
    """Resolves the config for the fewest processes that use all its axes, with two data ranks if possible."""
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
    if config.largest_batch and all(keys):
        derived = [max(1, config.largest_batch // ((keys[0] or 1) * (keys[1] or 1)))]
    sizes = (config.parallel.hybrid_shard_size, config.zero_optimization.zero_hpz_partition_size)
    shard = [2 * size for size in sizes if size]
    unit = fewest_processes(config) // model_ranks  # unit of data ranks that ep and hybrid sharding need
    refused: ConfigError | None = None
    for dp in [*derived, *shard, 2 * unit, unit, 2, 4, 8, 1]:
        try:
            return resolve(config, world_size=model_ranks * dp)
        except ConfigError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def prove(shrunk: ShrunkRun, work: Path, *, steps: int, gpus: bool = False) -> list[ProofResult]:
    """Runs a shrunk layout and its reference, and compares them; one result per precision.

    Args:
        shrunk: the shrunk run.
        work: an empty directory.
        steps: steps of each run, 2 or more.
        gpus: whether the ranks compute on the GPUs of this machine; else on the CPU.

    Raises:
        HeadraceError: a rank refused the shrunk run.
    """
    from pipeline.plan.proof.compare import RESUMED  # noqa: PLC0415
    from pipeline.plan.proof.equivalence import check_equivalence  # noqa: PLC0415
    from pipeline.plan.proof.shrunk_run import SEQUENCE, VOCABULARY  # noqa: PLC0415
    from pipeline.plan.proof.tokens import write_tokens  # noqa: PLC0415
    from pipeline.plan.proof.worker import run_cases  # noqa: PLC0415

    tokens = write_tokens(work / "tokens", vocab_size=VOCABULARY, tokens=16_000, longest=2 * SEQUENCE)
    precisions = ["fp32"] if shrunk.precision == "fp32" else ["fp32", shrunk.precision]
    saved = (1, steps // 2)
    cases: list[Case] = []
    for p in precisions:
        cases.append(shrunk.reference(f"reference-{p}", precision=p, tokens=tokens, save=saved))
        # the layout resumes from the reference's state; below, the reference resumes from the layout's
        source = (cases[-1].name, saved[1])
        cases.append(shrunk.layout(f"layout-{p}", precision=p, tokens=tokens, save=saved, resume_from=source))
    cases.append(replace(cases[0], name="resumed-fp32", resume_from=("layout-fp32", saved[1])))
    print(f"  {shrunk.topology}, {steps} steps in {' and '.join(precisions)}", flush=True)
    case_results = run_cases(cases, work, on_result=_print_case, gpus=gpus)
    known = {case.name: (case, case_results[case.name]) for case in cases}
    fp32 = known["reference-fp32"]
    results = [
        check_equivalence(known[f"layout-{p}"], known[f"reference-{p}"], fp32_reference=fp32) for p in precisions
    ]
    resumed = check_equivalence(known["resumed-fp32"], fp32, fp32_reference=fp32)
    others = [replace(each, quantity=READ_BY_REFERENCE) for each in resumed.comparisons if each.quantity == RESUMED]
    first = results[0]
    results[0] = replace(first, comparisons=(*first.comparisons, *others), error=first.error or resumed.error)
    return _look_at_noise(results, known, work, gpus=gpus)


def _look_at_noise(
    results: list[ProofResult], known: dict[str, tuple[Case, CaseResult]], work: Path, *, gpus: bool
) -> list[ProofResult]:
    """Runs the reference with noise as large as rounding, in every precision whose curves are not equal."""
    from pipeline.plan.proof.equivalence import with_noise  # noqa: PLC0415
    from pipeline.plan.proof.tolerance import UNIT_ROUNDOFF  # noqa: PLC0415
    from pipeline.plan.proof.worker import run_cases  # noqa: PLC0415

    unclear = [result.precision for result in results if not result.passed and result.error is None]
    cases = {
        p: replace(known[f"reference-{p}"][0], name=f"noise-{p}", noise=UNIT_ROUNDOFF[p], resume_from=None)
        for p in unclear
    }
    found = run_cases(list(cases.values()), work, on_result=_print_case, gpus=gpus) if cases else {}
    return [
        with_noise(result, (cases[p], found[f"noise-{p}"]), known[f"reference-{p}"]) if p in cases else result
        for result in results
        for p in (result.precision,)
    ]


def raise_refusal(case: Case, result: CaseResult) -> None:
    """Raises the error with which the ranks of a case refused it.

    Raises:
        HeadraceError: a rank refused the case, although the config passed the checks at its own size.
    """
    if result.refusal is not None:
        where = f"in the shrunk run {case.name}, whose sizes are not the config's"
        raise HeadraceError(f"{result.refusal}\n  where: {where}")


def _print_case(case: Case, result: CaseResult) -> None:
    raise_refusal(case, result)
    print(f"  {case.name:<16} {case.processes:>2} processes {result.seconds:6.1f} s", flush=True)
