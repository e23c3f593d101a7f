"""Results of the campaign: a table on the terminal, and as Markdown."""

from __future__ import annotations

import os
import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import deepspeed
import torch
from rich.table import Table

from foundation.directory import code_version
from tests.runtime.faults.campaign.layouts import EVALUATE_EVERY, KEEP, SAVE_EVERY, SILENT_S, STEPS
from tests.runtime.faults.campaign.run_under_test import Outcome

HEAD = (
    "fault",
    "times",
    "hung",
    "resumed wrongly",
    "lost more",
    "reported wrongly",
    "median s until all processes exited",
    "longest s",
    "median steps lost",
    "most steps lost",
    "exit codes",
)


def rows_of(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """One row per kind of fault, and a last one for all."""
    kinds = list(dict.fromkeys(sorted(outcome.kind for outcome in outcomes)))
    rows = [_row(kind, [each for each in outcomes if each.kind == kind]) for kind in kinds]
    return [*rows, _row("all", outcomes)]


def table_of(outcomes: Sequence[Outcome]) -> Table:
    table = Table(*HEAD)
    for row in rows_of(outcomes):
        table.add_row(*row)
    return table


def markdown_of(outcomes: Sequence[Outcome], *, command: str, seed: int, minutes: float) -> str:
    failed = sum(bool(outcome.violations) for outcome in outcomes)
    code = code_version()
    short = (code["commit"] or "")[:12]
    lines = [
        "# The fault injection campaign",
        "",
        f"{len(outcomes)} faults at random moments, {'none' if failed == 0 else failed} of which failed a check."
        f" {datetime.now(UTC):%Y-%m-%d}, {minutes:.0f} minutes, seed {seed}, headrace {code['headrace']} at or after"
        f" commit {short}.",
        "",
        f"    {command}",
        "",
        f"Machine: {os.cpu_count()} cores ({_cpu()}), no GPU; Python {platform.python_version()},"
        f" torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, gloo.",
        "",
        f"Runs of {STEPS} steps, a checkpoint every {SAVE_EVERY} (asynchronous, the newest {KEEP} are kept), an"
        f" evaluation every {EVALUATE_EVERY}; `watchdog.heartbeat_timeout` is {SILENT_S:g} s."
        " Finished runs are followed by new ones.",
        "",
        *_markdown(HEAD, rows_of(outcomes)),
        "",
        'Exit codes are those of the launcher; a negative one is the number of the signal that ended it. "Steps'
        ' lost" are those that were done and had to be repeated. Checked after every fault:',
        "",
        "- all processes exited in time;",
        "- every finished checkpoint matched the checksums of its manifest, except those damaged on purpose;",
        "- the next start resumed from the newest intact checkpoint, which was at least the one before the last begun;"
        " after SIGTERM, SIGUSR1 and SIGINT from the last step;",
        "- the journal had every step once, in order, with exactly the losses of an undisturbed run, and"
        " every evaluation;",
        "- at most one fault was recorded, and exactly one, of the right rank, where one rank was killed or stopped in"
        " training;",
        "- with `--nproc` and one process: a documented exit code, and no traceback. Other launchers have codes and"
        " tracebacks of their own, which are not checked.",
        "",
        *_shares("Moment", [outcome.moment for outcome in outcomes]),
        "",
        *_shares("Layout", [outcome.layout for outcome in outcomes]),
        "",
        "nproc is `--nproc 2`; warm is the same with launcher and ranks forked from a process that has done the"
        " imports, which are nearly all that a start costs.",
        "",
        *_shares("Launcher", [outcome.launcher for outcome in outcomes]),
        "",
    ]
    return "\n".join(lines)


def _row(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    sorts = ("hung", "resumed wrongly", "lost more", "reported wrongly")
    broken = [str(sum(any(v.sort == sort for v in each.violations) for each in outcomes)) for sort in sorts]
    seconds, lost = [each.seconds for each in outcomes], [each.lost for each in outcomes]
    codes = Counter(each.code for each in outcomes)
    shown = ", ".join(f"{code} ({count})" for code, count in codes.most_common())
    times = [f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"]
    steps = [f"{statistics.median(lost):g}", str(max(lost))]
    return [name, str(len(outcomes)), *broken, *times, *steps, shown]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = ["---", *["---:"] * (len(head) - 2), "---"]
    return [f"| {' | '.join(row)} |" for row in (head, ruler, *rows)]


def _shares(title: str, names: Sequence[str]) -> list[str]:
    rows = [[name, str(count)] for name, count in Counter(names).most_common()]
    return _markdown([title, "faults"], rows)


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123  no file of ours
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
