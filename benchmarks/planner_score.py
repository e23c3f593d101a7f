"""Predicted against measured step time on this CPU: three models on 1, 2 and 4 processes (docs/reference/planner.md).

    python -m benchmarks.planner_score [--steps 12] [--rounds 2] [--work DIR] [--again]

1. `headrace plan --calibrate` measures this machine.
2. Every run is a real one (`headrace train`, engine torch, fp32, one thread per process). Its median step is compared
   with that calibration's prediction, as in `headrace plan --score`.
3. The machine is fitted, as by `--save-calibration`, to the runs of the smallest and the largest model on 1 and 2
   processes. It predicts the medium model, and 4 processes, neither of which it has seen.
4. The same, with a step's CPU time instead of wall-clock time, which other work on a busy machine lengthens. A step
   takes its CPU time if every process has its own core, except for waiting, and is predicted that way. It includes
   gloo's copies and sums.

With --again no run is trained: existing runs in --work are scored, with the machine.json there.

Rounds alternate: all runs see the same load. Medians over the rounds count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import llama, make_parser, print_head, print_row, work_folder
from pipeline.plan.calibration.fit import fitted
from pipeline.plan.calibration.score import Score, read_measured, rescored, score
from pipeline.plan.proof.tokens import write_tokens
from pipeline.runtime.machines.known import load_machine
from pipeline.runtime.machines.machine import Machine

MODELS = {"2M": (160, 4), "5M": (256, 4), "10M": (384, 4)}
"""Parameters -> hidden size and layers; products take most of a step's time."""

PROCESSES = (1, 2, 4)
SEQUENCE, SAMPLES, VOCABULARY = 128, 4, 1024


def config_of(hidden: int, layers: int, tokens: Path, run_dir: Path, *, steps: int) -> dict[str, Any]:
    """The config of a run with some steps, without evaluation and checkpoints in between."""
    return {
        "engine": "torch",
        "model": llama(hidden=hidden, layers=layers, heads=hidden // 32, mlp=4),
        "data": {"sources": [{"path": str(tokens)}], "sequence_length": SEQUENCE},
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "run": {"dir": str(run_dir), "steps": steps, "checkpoint_minutes": 0},
        "evaluation": {"samples": 2},
    }


def headrace(*arguments: str) -> None:
    """Runs a command with one thread per process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "headrace", *arguments]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def main() -> None:
    """Prints the tables in Markdown."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--work", type=Path, help="keep runs and machine files there")
    parser.add_argument("--again", action="store_true", help="score the runs in --work, with its machine.json")
    arguments = parser.parse_args()
    if arguments.again and not (arguments.work and known(arguments.work)):
        parser.error("--again: there are no runs in --work")
    with work_folder() as temporary:
        work = arguments.work or temporary
        work.mkdir(parents=True, exist_ok=True)
        tokens = work / "tokens"
        if not tokens.exists():
            write_tokens(tokens, vocab_size=VOCABULARY, tokens=200_000, longest=512)
        machine = work / "machine.json"
        if arguments.again:
            runs = known(work)
        else:
            headrace("plan", "--calibrate", "--machine", str(machine))
            runs = trained(tokens, work, steps=arguments.steps, rounds=arguments.rounds)
        report(runs, machine)


def trained(tokens: Path, work: Path, *, steps: int, rounds: int) -> dict[tuple[str, int], list[Path]]:
    """Trains every run; returns (model, processes) -> directories of its runs."""
    found: dict[tuple[str, int], list[Path]] = {}
    for number in range(rounds):
        for processes in PROCESSES:
            for name, (hidden, layers) in MODELS.items():
                run_dir = work / f"{name}-{processes}-{number}"
                config = work / f"{run_dir.name}.json"
                config.write_text(json.dumps(config_of(hidden, layers, tokens, run_dir, steps=steps)))
                headrace("train", "--config", str(config), "--nproc", str(processes))
                found.setdefault((name, processes), []).append(run_dir)
                print(f"{run_dir.name}: load {os.getloadavg()[0]:.0f}", file=sys.stderr, flush=True)
    return found


def known(work: Path) -> dict[tuple[str, int], list[Path]]:
    """(model, processes) -> existing directories of its runs."""
    found = {(name, of): sorted(work.glob(f"{name}-{of}-[0-9]")) for of in PROCESSES for name in MODELS}
    return {key: paths for key, paths in found.items() if paths}


def report(runs: dict[tuple[str, int], list[Path]], machine: Path) -> None:
    """Prints the table, and the medians."""
    calibrated = load_machine(str(machine))
    scores = {key: [score(read_measured(path), calibrated) for path in paths] for key, paths in runs.items()}
    first, *_, last = MODELS
    seen = {key for key in scores if key[0] in (first, last) and key[1] < 4}
    after = refitted(scores, seen, calibrated)
    on_cpu = {key: [with_cpu_time(each) for each in found] for key, found in scores.items()}
    computing = refitted(on_cpu, seen, calibrated)
    head = ("model", "processes", "step, s", "error, calibrated", "error, fitted")
    print_head(*head, "CPU time of a step, s", "error, fitted")
    errors: dict[tuple[str, int], tuple[float, float, float]] = {}
    for key, found in scores.items():
        errors[key] = error(found), error(after[key]), error(computing[key])
        calibrated_error, *fits = (f"{each:+.0%}" for each in errors[key])
        step, cpu = (median(each.step.measured for each in of[key]) for of in (scores, on_cpu))
        clock, of_cpu = (f"{each}{' (seen)' if key in seen else ''}" for each in fits)
        print_row(*key, f"{step:.3f}", calibrated_error, clock, f"{cpu:.3f}", of_cpu)
    for label, chosen in (
        ("1 and 2 processes", [key for key in scores if key[1] < 4]),
        ("of these not seen by the fit", [key for key in scores if key[1] < 4 and key not in seen]),
        ("4 processes", [key for key in scores if key[1] == 4]),
    ):
        if chosen:
            middles = (median(abs(errors[key][column]) for key in chosen) for column in range(3))
            shown = [f"{each:.0%}" for each in middles]
            print(f"\n{label}: median error calibrated {shown[0]}, fitted {shown[1]}, of CPU time {shown[2]}")


def refitted(
    scores: dict[tuple[str, int], list[Score]], seen: set[tuple[str, int]], machine: Machine
) -> dict[tuple[str, int], list[Score]]:
    """The scores by a machine that is fitted to some of the runs."""
    own = fitted([each for key, found in scores.items() if key in seen for each in found], machine)
    return {key: [rescored(each.measured, each.planned, own) for each in found] for key, found in scores.items()}


def with_cpu_time(each: Score) -> Score:
    """The score as if a step took its CPU time, on as many hosts as give every process a core."""
    run, machine = each.measured, each.planned.machine
    record = {**run.record, "step_s": [run.record["cpu_s"]] * 3}
    hosts = -(-run.record["world_size"] // machine.devices_per_node)
    return rescored(replace(run, record=record, hosts=hosts), each.planned, machine)


def error(found: list[Score]) -> float:
    """Relative error of the medians over several runs with the same layout."""
    return median(each.step.predicted for each in found) / median(each.step.measured for each in found) - 1


if __name__ == "__main__":
    main()
