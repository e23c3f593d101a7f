"""`headrace plan --search`: the best layouts as a table and a page, and the winner as a config."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.parallel.fp8 import torchao_note
from pipeline.plan.answer import ERRORS, published
from pipeline.plan.laws.law_warnings import warnings
from pipeline.plan.laws.show_laws import training_of_plan
from pipeline.plan.predict.memory_plan import with_margin
from pipeline.plan.predict.plan import make_plan
from pipeline.plan.predict.planned_run import PlannedRun
from pipeline.plan.search.fewest_nodes import fewest_nodes, undivided
from pipeline.plan.search.margin_cost import margin_cost
from pipeline.plan.search.search import Candidate, Search, allowed, search, simulated
from pipeline.plan.search.search_page import Table, page
from pipeline.plan.search.verify import Verified, verify, winner_of, write_config
from pipeline.plan.show import money_text
from pipeline.run.before.memory_summary import shown_bytes

_SHOWN = 12
_BUDGET_S = 60.0
"""CPU seconds for executing steps if `--verify` gives no number."""
_HEAD = ("layout", "micro-batch", "checkpointing", "step, s", "tokens/s", "peak", "executed", "to the first", "known")


def search_command(planned: PlannedRun, arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Searches layouts, executes the best on fake tensors, and writes the results.

    Raises:
        ConfigError: no layout fits (the error names the number of nodes that would), or `--out` cannot be written.
    """
    out = Path(arguments.out or "out/plan")
    planned = replace(planned, machine=with_margin(planned.machine, arguments.memory_margin))
    _check_out(out)
    found = search(planned.run, planned.costs, planned.machine, on_progress=_progress)
    count = (_SHOWN if arguments.verify is None else arguments.verify) if found.whole else 0
    best = allowed(found.fitting(), planned.costs, count=max(_SHOWN, count))
    own = [each for each in best if "fp8.enabled" not in each.sets]
    if not own:  # all of the fastest layouts are in fp8
        own = allowed((each for each in found.fitting() if "fp8.enabled" not in each.sets), planned.costs, count=_SHOWN)
    if not own:
        raise _nothing_fits(planned, found)
    own = simulated([*own, *_first_known(found, own, planned)], planned.costs, planned.machine)
    if not arguments.json and count:
        _print(_table([Verified(each, None) for each in own], planned), [])
    verified = _verified(own, planned, arguments, overrides, count=count)
    winner = winner_of(verified, memory=planned.machine.memory.bytes, experts=_experts(planned))
    if winner is None:
        why = "the executed steps of the best layouts need more than a device has, though the formulas say less"
        raise ConfigError("--search", why=why, remedy="--verify with a larger number, or more nodes")
    _make(out)
    path = out / f"{Path(arguments.config).stem}-best.json"
    write_config(winner.candidate, path, config=arguments.config, overrides=overrides)
    table = _table(verified, planned)
    chosen = replace(planned, run=winner.candidate.run)
    training = training_of_plan(chosen)
    warned = [] if training is None else list(warnings(training))
    facts = [*_facts(planned, found, winner, str(path), arguments), *_ties(verified, planned)]
    facts += [("warning", text) for text in warned]
    (out / "search.html").write_text(
        page(found, table, title=f"Layouts of {Path(arguments.config).name}", facts=facts), encoding="utf-8"
    )
    if arguments.json:
        print(json.dumps({**_plain(found, verified, winner, str(path), planned), "warnings": warned}, indent=2))
    else:
        _print(table, [*facts, ("page", str(out / "search.html"))])
    sys.stdout.flush()
    return 0


def _check_out(out: Path) -> None:
    """Refuses a results directory that cannot be made or written, before any work.

    Raises:
        ConfigError: a file is in its way, or the part of its path that exists is not writable.
    """
    there = next(each for each in (out, *out.absolute().parents) if each.exists())
    if not there.is_dir():
        raise ConfigError("--out", str(out), why=f"{there} is a file", remedy="a directory that can be written")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError("--out", str(out), why=f"{there} is not writable", remedy="another directory")


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", str(out), why=str(error.strerror), remedy="another directory") from None


def _verified(
    best: Sequence[Candidate],
    planned: PlannedRun,
    arguments: argparse.Namespace,
    overrides: Sequence[str],
    *,
    count: int,
) -> list[Verified]:
    count = min(count, len(best))
    budget_s = _BUDGET_S if arguments.verify is None else math.inf
    within = f", within {budget_s:g} s of CPU" if arguments.verify is None else ""

    def say(each: Verified) -> None:
        what = each.why_not.splitlines()[0] if each.peak is None else shown_bytes(each.peak)
        print(f"executed: {each.candidate.run.layout}: {what}", file=sys.stderr, flush=True)

    done: list[Verified] = []
    if count:
        print(f"executing a step of {count} layouts on fake tensors{within} ...", file=sys.stderr, flush=True)
        first = winner_of([Verified(each, None) for each in best[:count]], memory=planned.machine.memory.bytes)
        # the layout that would win is executed whatever the time
        ordered = sorted(best[:count], key=lambda each: first is None or each is not first.candidate)
        done = verify(ordered, planned, arguments.config, overrides, budget_s=budget_s, on_result=say)
    done.sort(key=lambda each: each.candidate.step_s)
    return [*done, *(Verified(each, None, "not among the first --verify layouts") for each in best[count:])]


def _nothing_fits(planned: PlannedRun, found: Search) -> ConfigError:
    nodes = fewest_nodes(planned)
    smallest = min((each.peak for each in found.candidates), default=None)
    least = "no rule allows any" if smallest is None else f"the smallest peak is {shown_bytes(smallest)}"
    why = f"none of {found.looked_at:,} layouts fits {shown_bytes(planned.machine.memory.bytes)}: {least}"
    if smallest is None:
        why = f"no layout: {undivided(planned, planned.run.topology.world_size)}, or a rule refuses each"
    remedy = "a smaller model, or a machine with more memory" if nodes is None else f"--nodes {nodes[0]} would hold it"
    return ConfigError("--search", why=why, remedy=remedy)


def _progress(count: int, best: Candidate | None) -> None:
    so_far = "none fits yet" if best is None else f"best so far {best.step_s:.3g} s a step, {best.run.layout}"
    print(f"search: {count:,} layouts, {so_far} (Ctrl-C: print the best so far)", file=sys.stderr, flush=True)


def _experts(planned: PlannedRun) -> bool:
    return bool(planned.costs.widths.all_experts)


def _is_known(each: Candidate, planned: PlannedRun) -> bool:
    """Whether plans of the layout's kind were compared with published runs."""
    return published(each.run, experts=_experts(planned))


def _error(planned: PlannedRun) -> float:
    """Median error of plans for this kind of model."""
    return ERRORS["experts" if _experts(planned) else "dense"]


def _first_known(found: Search, best: Sequence[Candidate], planned: PlannedRun) -> list[Candidate]:
    """The fastest layout of a kind that was compared with published runs, if `best` has none."""
    if any(_is_known(each, planned) for each in best):
        return []
    known = (each for each in found.fitting() if _is_known(each, planned))
    return allowed((each for each in known if "fp8.enabled" not in each.sets), planned.costs, count=1)


def _is_tie(each: Verified, first: float, planned: PlannedRun) -> bool:
    """Whether the layout is slower than the first by no more than the median error of plans for this kind of model."""
    return each.candidate.step_s / first - 1 <= _error(planned)


def _table(verified: Sequence[Verified], planned: PlannedRun) -> Table:
    """The best layouts: ties of the fastest with published runs of their kind, then simpler ones, go first."""
    first = min(each.candidate.step_s for each in verified)

    def place(each: Verified) -> tuple[bool, bool, int, float]:
        found, tie = each.candidate, _is_tie(each, first, planned)
        return not tie, tie and not _is_known(found, planned), _axes_of(found.run) if tie else 0, found.step_s

    known = sorted(verified, key=lambda each: each.candidate.step_s)[:_SHOWN]
    known += [each for each in verified if each not in known and published(each.candidate.run, experts=True)][:1]
    rows = []
    for each in sorted(known, key=place):
        slower = f"{each.candidate.step_s / first - 1:+.1%}{', tie' if _is_tie(each, first, planned) else ''}"
        like = "published runs" if _is_known(each.candidate, planned) else "no published run"
        rows.append([*_row(each, planned), slower, like])
    return Table(_HEAD, rows)


def _axes_of(run: ResolvedRun) -> int:
    """Number of parallel axes beside data parallelism."""
    return sum(getattr(run.topology, axis) > 1 for axis in ("pp", "cp", "tp", "ep"))


def _ties(verified: Sequence[Verified], planned: PlannedRun) -> list[tuple[str, str]]:
    first = min(each.candidate.step_s for each in verified)
    count = sum(_is_tie(each, first, planned) for each in verified)
    kind = "experts" if _experts(planned) else "dense"
    why = f"within {_error(planned):.0%}, the median error of plans of published runs ({kind})"
    order = "those with published runs of their kind first, then those with fewer axes; --calibrate decides"
    return [("ties", f"{count} layouts are {why}: {order}")] if count > 1 else []


def _row(each: Verified, planned: PlannedRun) -> list[str]:
    run = each.candidate.run
    plan = make_plan(run, planned.costs, planned.machine)
    return [
        run.layout,
        f"{run.batch.micro} x {run.batch.accumulation}",
        run.config.memory.activation_checkpointing,
        plan.step_s.shown(lambda seconds: f"{seconds:.3g}"),
        plan.tokens_per_s.shown(lambda speed: f"{speed:,.0f}"),
        shown_bytes(each.candidate.peak),
        "not executed" if each.peak is None else shown_bytes(each.peak),
    ]


def _facts(
    planned: PlannedRun, found: Search, winner: Verified, path: str, arguments: argparse.Namespace
) -> list[tuple[str, str]]:
    run = planned.run
    speed = found.looked_at / max(found.seconds, 1e-9)
    facts = [
        ("machine", f"{planned.machine.name}, {run.topology.world_size} ranks on {planned.nodes} node(s)"),
        ("batch", f"{run.batch.samples} samples per step, {run.batch.tokens:,} tokens"),
        (
            "search",
            f"{found.looked_at:,} layouts in {found.seconds:.1f} s ({speed:,.0f} per second), {found.refused:,} refused"
            f" by a rule, {found.larger:,} larger than one that does not fit; {len(found.fitting()):,} fit,"
            f" {len(found.pareto())} on the Pareto front{'' if found.whole else '; ended early by Ctrl-C'}",
        ),
        ("best", f"{winner.candidate.run.layout}: {winner.candidate.step_s:.3g} s per step{_unproven(winner)}"),
        ("memory", f"{arguments.memory_margin:.0%} of a device stays free (--memory-margin)"),
        *margin_cost(planned, found, winner.candidate, margin=arguments.memory_margin),
        ("config", path),
    ]
    if arguments.price is not None:
        plan = make_plan(winner.candidate.run, planned.costs, planned.machine)
        facts.insert(-1, ("money", money_text(plan, arguments.price)))
    in_fp8 = (each for each in found.fitting() if "fp8.enabled" in each.sets)
    for fp8 in simulated(allowed(in_fp8, planned.costs, count=1), planned.costs, planned.machine):
        gain = winner.candidate.step_s / fp8.step_s - 1
        experts = ", experts in bf16" if "fp8.experts" in fp8.sets else ""
        facts.append(("in fp8", f"{gain:+.0%} tokens/s at best{experts}; another loss curve, so it is not proposed"))
        if (missing := torchao_note()) is not None:
            facts.append(("", missing))
    return facts


def _unproven(winner: Verified) -> str:
    return "" if winner.peak is not None else f"; peak by the formulas, no step was executed: {winner.why_not}"


def _print(table: Table, facts: Sequence[tuple[str, str]]) -> None:
    widths = [max(len(row[column]) for row in [table.head, *table.rows]) for column in range(len(table.head))]
    for row in [table.head, *table.rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
    for label, text in facts:
        print(f"{label:>14}  {text}")


def _plain(
    found: Search, verified: Sequence[Verified], winner: Verified, path: str, planned: PlannedRun
) -> dict[str, Any]:
    first = min(each.candidate.step_s for each in verified)

    def plain(each: Verified) -> dict[str, Any]:
        candidate = each.candidate
        return {
            "layout": candidate.run.layout,
            "sets": dict(candidate.sets),
            "step_s": candidate.step_s,
            "peak": candidate.peak,
            "executed_peak": each.peak,
            "not_executed": each.why_not or None,
            "tie": _is_tie(each, first, planned),
            "published_runs": _is_known(candidate, planned),
        }

    return {
        "looked_at": found.looked_at,
        "refused": found.refused,
        "larger": found.larger,
        "whole": found.whole,
        "seconds": found.seconds,
        "fitting": len(found.fitting()),
        "pareto": [{"step_s": each.step_s, "peak": each.peak, "sets": dict(each.sets)} for each in found.pareto()],
        "best": [plain(each) for each in verified],
        "winner": plain(winner),
        "config": path,
    }
