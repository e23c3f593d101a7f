"""Strikes runs at random moments, and looks at what becomes of them: `python -m tests.faults.campaign --kills 200`."""

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
from tests.faults.campaign.driver import Campaign, broken, dealt
from tests.faults.campaign.layouts import LAYOUTS
from tests.faults.campaign.life import Outcome
from tests.faults.campaign.report import markdown_of, table_of
from tests.faults.campaign.strikes import KINDS, can_mount


def main() -> int:
    """Entry point; 1 when a promise was broken."""
    asked = _arguments()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it, and what is started inherits
    console = Console(stderr=True)
    work = Path(tempfile.mkdtemp(prefix="headrace-campaign-", dir=asked.work))
    if not can_mount():
        console.print("no full disks: that needs root, to make small file systems")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"), TimeElapsedColumn())
    began = time.monotonic()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("strikes", total=asked.kills, now="")

        def report(outcome: Outcome) -> None:
            progress.update(task, advance=1, now=outcome.kind)
            progress.console.print(_line(outcome), highlight=False, markup=False, soft_wrap=True)

        campaign = Campaign(
            work,
            make_tokens(work, text_folders()),
            [layout for layout in LAYOUTS if not asked.layout or asked.layout in layout.name],
            asked.launcher.split(","),
            asked.seed,
            report=report,
            say=lambda text: progress.console.print(text, highlight=False, markup=False),
        )
        names = [asked.kind] * asked.kills if asked.kind else dealt(asked.kills, random.Random(asked.seed))
        outcomes = campaign.run(names, jobs=asked.jobs)
    console.print(table_of(outcomes))
    if asked.report is not None:
        minutes = (time.monotonic() - began) / 60
        command = f"python -m tests.faults.campaign {' '.join(sys.argv[1:])}"
        asked.report.parent.mkdir(parents=True, exist_ok=True)
        asked.report.write_text(markdown_of(outcomes, command=command, seed=asked.seed, minutes=minutes))
    for outcome, violation in broken(outcomes):
        console.print(f"{violation.sort}: {_line(outcome)}\n  {violation.what}\n  kept: {outcome.work}", markup=False)
    return 1 if broken(outcomes) else 0


def _line(outcome: Outcome) -> str:
    words = (outcome.kind, outcome.moment, outcome.phase, outcome.launcher, outcome.layout)
    broken_ = "".join(f"\n  {violation.sort}: {violation.what}" for violation in outcome.violations)
    return f"{', '.join(words)}: code {outcome.code}, {outcome.seconds:.1f} s, {outcome.lost} steps lost{broken_}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="strikes")
    parser.add_argument("--seed", type=int, default=1, help="of what is struck, how and when")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    launchers = "warm,warm,warm,warm,warm,warm,nproc,nproc,torchrun,deepspeed"
    text = "drawn from; warm is --nproc, forked from a process that has done the imports"
    parser.add_argument("--launcher", default=launchers, help=text)
    parser.add_argument("--layout", default="", help="only layouts whose name has this in it")
    parser.add_argument("--kind", choices=sorted(KINDS), help="only strikes of this kind")
    parser.add_argument("--work", type=Path, help="where the runs lie; a temporary directory when absent")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="writes the figures there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
