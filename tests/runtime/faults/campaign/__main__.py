"""Fault injection campaign: faults at random moments of runs. `python -m tests.runtime.faults.campaign --kills 200`."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.conftest import make_tokens, text_folders
from tests.runtime.faults.campaign.driver import Campaign, draw_faults, violations_of
from tests.runtime.faults.campaign.injections import FAULTS, can_mount
from tests.runtime.faults.campaign.layouts import LAYOUTS
from tests.runtime.faults.campaign.report import markdown_of, table_of
from tests.runtime.faults.campaign.run_under_test import Outcome


def main() -> int:
    arguments = _arguments()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's `&` ignores it, and child processes inherit that
    console = Console(stderr=True)
    work = Path(tempfile.mkdtemp(prefix="headrace-campaign-", dir=arguments.work))
    if not can_mount():
        console.print("no full-disk faults: they need root, to mount small file systems")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"), TimeElapsedColumn())
    began = time.monotonic()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("faults", total=arguments.kills, now="")

        def report(outcome: Outcome) -> None:
            progress.update(task, advance=1, now=outcome.kind)
            progress.console.print(_line(outcome), highlight=False, markup=False, soft_wrap=True)

        campaign = Campaign(
            work,
            make_tokens(work, text_folders()),
            [layout for layout in LAYOUTS if not arguments.layout or arguments.layout in layout.name],
            arguments.launcher.split(","),
            arguments.seed,
            report=report,
            log=lambda text: progress.console.print(text, highlight=False, markup=False),
        )
        names = (
            [arguments.kind] * arguments.kills
            if arguments.kind
            else draw_faults(arguments.kills, random.Random(arguments.seed))
        )
        outcomes = campaign.run(names, jobs=arguments.jobs)
    console.print(table_of(outcomes))
    if arguments.report is not None:
        minutes = (time.monotonic() - began) / 60
        command = f"python -m tests.runtime.faults.campaign {' '.join(sys.argv[1:])}"
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(markdown_of(outcomes, command=command, seed=arguments.seed, minutes=minutes))
    for outcome, violation in violations_of(outcomes):
        console.print(f"{violation.sort}: {_line(outcome)}\n  {violation.what}\n  kept: {outcome.work}", markup=False)
    return 1 if violations_of(outcomes) else 0


def _line(outcome: Outcome) -> str:
    names = (outcome.kind, outcome.moment, outcome.phase, outcome.launcher, outcome.layout)
    violations = "".join(f"\n  {violation.sort}: {violation.what}" for violation in outcome.violations)
    return f"{', '.join(names)}: code {outcome.code}, {outcome.seconds:.1f} s, {outcome.lost} steps lost{violations}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="number of faults")
    parser.add_argument("--seed", type=int, default=1, help="seed of layouts, faults and moments")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    launchers = "warm,warm,warm,warm,warm,warm,nproc,nproc,torchrun,deepspeed"
    text = "drawn at random; warm is --nproc, forked from a process that has done the imports"
    parser.add_argument("--launcher", default=launchers, help=text)
    parser.add_argument("--layout", default="", help="only layouts whose name contains this")
    parser.add_argument("--kind", choices=sorted(FAULTS), help="only faults of this kind")
    parser.add_argument("--work", type=Path, help="directory for the runs; a temporary one when absent")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="write the figures there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
