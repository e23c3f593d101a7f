"""Checks the project on a machine with GPUs: environment, GPU tests, speed. `make gpu-check` runs it on a bare machine.

    python -m benchmarks.gpu [--minutes 10] [--only tests,1b-torch-*] [--profile] [--wheels DIR] [--tiny] ...

It needs torch, but no network. If a package is missing or torch is too old, the report lists what is skipped. A row
that runs out of memory or time is reported with its reason. Everything runs in processes with a time limit, the most
important rows first, until the minutes are over. `--only` takes parts (environment, tests, speed) and shell patterns of
row names (`--list` prints them). Tests see all GPUs; a row uses the first, or all of them (`*-gpus`). Results are a
section of docs/performance.md, and JSON, logs and profiler traces in the folder of `--out`. `--tiny` runs the same
steps on a CPU with a model of four layers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.cases import Row, rows, selected, sizes, tiny_sizes
from benchmarks.gpu_check.page import append, section
from benchmarks.gpu_check.process import ROOT, environment, install_wheels, missing_packages, on_one_gpu, run
from benchmarks.gpu_check.tests import run_tests
from benchmarks.harness import make_parser

ROW_LIMIT_S = 150.0
"""Time limit of a row: imports, compilation and steps."""
LEAST_S = 20.0
"""Least seconds left for starting a row."""
TINY_RANKS = 2
"""Number of processes of a row on all GPUs, on a CPU."""
TESTS_SHARE = 0.35
"""Largest share of the minutes for the tests, if rows are selected, too."""


def main() -> int:
    """Runs the selected parts; the exit code is 1 if a GPU test failed."""
    arguments = parsed()
    names = list(tiny_sizes() if arguments.tiny else sizes(arguments.sequence))
    chosen = [row for row in rows(names) if selected(row.name, "speed", arguments.only)]
    if arguments.list:
        print("\n".join(["environment", "tests", *(row.name for row in rows(names))]))
        return 0
    deadline = time.monotonic() + 60 * arguments.minutes
    work: Path = arguments.out
    (work / "rows").mkdir(parents=True, exist_ok=True)
    site = work / "site" if arguments.wheels else None
    env = environment(site, tiny=arguments.tiny)
    result: dict[str, Any] = {"date": f"{datetime.date.today()}", "tiny": arguments.tiny, "rows": []}
    if arguments.wheels:
        say(install_wheels(arguments.wheels, work / "site", log=work / "wheels.log", env=env))
    result["missing"] = missing_packages(site)
    for name, use in result["missing"].items():
        say(f"package {name} is missing; skipped: {use}")
    result["machine"] = machine(work, env)
    say(json.dumps(result["machine"], indent=1))
    if selected("tests", "tests", arguments.only):
        share = TESTS_SHARE if chosen else 1.0
        result["tests"] = run_tests(work, limit_s=share * (deadline - time.monotonic()), env=env)
        say(
            f"tests: {result['tests']['passed']} passed, {result['tests']['failed']} failed, {result['tests']['ended']}"
        )
    for row in chosen:
        gpus = TINY_RANKS if arguments.tiny else result["machine"].get("devices", 1)
        result["rows"].append(measure(row, arguments, deadline, env, gpus=gpus))
        save(result, work)
    save(result, work)
    if arguments.page:
        append(arguments.page, result)
    print(section(result))
    return 1 if result.get("tests", {}).get("failed") else 0


def parsed() -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="time for everything")
    parser.add_argument("--only", help="parts and rows, e.g. tests,1b-torch-*")
    parser.add_argument("--list", action="store_true", help="print the names of parts and rows")
    parser.add_argument("--sequence", type=int, default=4096, choices=(4096, 8192), help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a row")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--profile", action="store_true", help="a profiler trace of 3 more steps of every row")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install into OUT/site first")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-check", help="folder of results")
    parser.add_argument("--page", type=Path, help="page that the tables are appended to")
    parser.add_argument("--tiny", action="store_true", help="on a CPU with a tiny model")
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    if arguments.wheels is not None:
        arguments.wheels = arguments.wheels.resolve()
        if not arguments.wheels.is_dir():
            parser.error(f"--wheels {arguments.wheels}: there is no such folder")
    if min(arguments.steps, arguments.warmup) < 1:
        parser.error("--steps and --warmup: at least 1")
    if arguments.page is not None and not arguments.page.is_file():
        parser.error(f"--page {arguments.page}: there is no such file")
    return arguments


def machine(work: Path, env: dict[str, str]) -> dict[str, Any]:
    """The findings of `gpu_check.machine`, or why it failed."""
    target = work / "machine.json"
    target.unlink(missing_ok=True)
    words = [sys.executable, "-m", "benchmarks.gpu_check.machine", str(target)]
    ended = run(words, log=work / "machine.log", limit_s=120, env=env)
    found: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {"reason": ended.last_line}
    return found


def measure(
    row: Row, arguments: argparse.Namespace, deadline: float, env: dict[str, str], *, gpus: int
) -> dict[str, Any]:
    """Measures a row, if it needs them on that many GPUs; returns its result, or the reason why it has none."""
    left, failed = deadline - time.monotonic(), {"name": row.name, "title": row.title, "attempts": []}
    if row.on_all_gpus and gpus < 2:
        return {**failed, "reason": "this machine has one GPU"}
    if left < LEAST_S:
        return {**failed, "reason": f"no time left of {arguments.minutes:g} minutes: --only {row.name}"}
    folder = arguments.out / "rows"
    job, target = folder / f"{row.name}.job.json", folder / f"{row.name}.json"
    target.unlink(missing_ok=True)
    trace = str(folder / f"{row.name}.trace.json.gz") if arguments.profile else None
    fields = {name: getattr(arguments, name) for name in ("tiny", "sequence", "steps", "warmup")}
    job.write_text(json.dumps({"row": asdict(row), "trace": trace, **fields}))
    several = ["torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", "-m"] if row.on_all_gpus else []
    words = [sys.executable, "-m", *several, "benchmarks.gpu_check.measure", str(job), str(target)]
    env, limit = env if row.on_all_gpus else on_one_gpu(env), min(left, ROW_LIMIT_S)
    start = time.monotonic()
    ended = run(words, log=folder / f"{row.name}.log", limit_s=limit, env=env)
    took = time.monotonic() - start
    if target.exists():
        found = {**json.loads(target.read_text()), "took_s": took}
    elif ended.code is None:
        found = {**failed, "reason": f"not finished after {limit:.0f} s: {ended.last_line}"}
    else:
        found = {**failed, "reason": f"exit code {ended.code}: {ended.last_line}"}
    outcome = f"{found['tokens_per_s']:,.0f} tokens/s" if "median_s" in found else found["reason"]
    say(f"{row.name}: {outcome} ({took:.0f} s)")
    return found


def save(result: dict[str, Any], work: Path) -> None:
    """Writes the results so far."""
    (work / "result.json").write_text(json.dumps(result, indent=1))


def say(text: str) -> None:
    """Prints at once: a time limit may end this process."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
