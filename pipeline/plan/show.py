"""A plan as lines of text, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.config.load import as_sets
from pipeline.engines.sizes.expert_load import ExpertLoad, expert_load
from pipeline.plan.answer import Answer, check_text, fits_text, notes_of, trust_text
from pipeline.plan.laws.law_warnings import Training
from pipeline.plan.laws.laws import chinchilla_loss
from pipeline.plan.laws.show_laws import law_lines, laws_json, training_of_plan
from pipeline.plan.predict.failures import UnderFailures, under_failures
from pipeline.plan.predict.interval import Interval, days_text, hours_text, seconds_text
from pipeline.plan.predict.memory_plan import with_margin
from pipeline.plan.predict.plan import Plan, make_plan
from pipeline.plan.predict.planned_run import PlannedRun
from pipeline.plan.search.changes import Change, nearest_change
from pipeline.plan.search.fewest_nodes import fewest_nodes
from pipeline.plan.stage_plans import PlannedStage, planned_stages, stage_lines, stages_json, total_of
from pipeline.run.before.memory_summary import shown_bytes
from pipeline.runtime.machines.machine import Machine


@dataclass(frozen=True)
class Report:
    """A plan, and the figures shown beside it.

    Attributes:
        planned: the run.
        plan: plan of the run.
        best: tokens/s at the efficiency of the best published runs with other engines; None where none is known.
        change: change of the layout that would help most; None where none helps.
        price: price of a GPU-hour, in any currency; None where it was not given.
        nodes: fewest nodes that would hold a run that does not fit, and the settings of their layout. None where the
            run fits, the change makes it fit, or no number of nodes is enough.
        training: hyperparameters for the published laws; None where the laws do not apply.
        failures: goodput, time and GPU-hours with failures of nodes; None on a CPU.
        stages: plan of each stage; empty for a run without stages. `plan` is then that of the first.
    """

    planned: PlannedRun
    plan: Plan
    best: Interval | None
    change: Change | None
    price: float | None
    nodes: tuple[int, dict[str, Any]] | None
    training: Training | None
    failures: UnderFailures | None
    stages: list[PlannedStage]


def report_of(planned: PlannedRun, *, price: float | None = None, margin: float = 0.0) -> Report:
    """Plans a run, and looks for the change that would help most.

    Args:
        planned: the run.
        price: price of a GPU-hour; None where it was not given.
        margin: share of a device's memory that a proposed change leaves free.

    Raises:
        ConfigError: the architecture does not support the layout.
    """
    plan = make_plan(planned.run, planned.costs, planned.machine)
    change = nearest_change(planned.run, planned.costs, with_margin(planned.machine, margin), plan)
    nodes = fewest_nodes(planned) if not plan.memory.fits and change is None else None
    failures = under_failures(plan, nodes=planned.nodes) if planned.machine.gpu else None
    best = planned.machine.as_best_published()
    fastest = None if best is None else make_plan(planned.run, planned.costs, best).tokens_per_s
    return Report(
        planned, plan, fastest, change, price, nodes, training_of_plan(planned), failures, planned_stages(planned)
    )


def lines(report: Report) -> Iterator[str]:
    """The plan for a terminal."""
    planned, plan = report.planned, report.plan
    yield _line("machine", _machine(planned))
    yield _line("layout", planned.run.layout)
    yield _line("batch", str(planned.run.batch))
    yield from _memory(report)
    if planned.run.topology.ep > 1:
        yield _line("expert load", _load(planned).text)
    yield _line("step", plan.step_s.shown(seconds_text))
    for name, seconds in plan.split.items():
        if seconds.high > 0:
            yield _line("", f"{name} {seconds.shown(seconds_text)}, {seconds.typical / plan.step_s.typical:.1%}")
    yield _line("speed", plan.tokens_per_s.shown(lambda each: f"{each:,.0f}") + " tokens/s")
    if report.best is not None:
        speed = report.best.shown(lambda each: f"{each:,.0f}")
        room = "" if plan.memory.fits else ", which does not fit our engines"
        yield _line("", f"the best published runs of other engines would reach {speed} tokens/s in this layout{room}")
    if plan.mfu is not None:
        yield _line("MFU", plan.mfu.shown(lambda each: f"{each:.1%}"))
    yield from _costs(report)
    if report.training is not None:
        yield _line("more", _more(report.training))
    yield _line("bound by", plan.binding)
    yield from _helps(report)
    yield from (_line("note", note) for note in notes_of(planned))
    yield _line("intervals", intervals_from(planned.machine))
    if report.training is not None:
        yield from (_line(label, text) for label, text in law_lines(report.training))


def answer(report: Report) -> Answer:
    """The figures of the plan's answer in at most 15 lines."""
    plan, stages = report.plan, report.stages
    return Answer(
        planned=report.planned,
        plan=plan,
        days=total_of(stages, "days") if stages else plan.days,
        gpu_hours=total_of(stages, "gpu_hours") if stages else plan.gpu_hours,
        change=report.change,
        nodes=report.nodes,
        price=report.price,
        training=report.training,
        stages=len(stages),
    )


def _costs(report: Report) -> Iterator[str]:
    plan = report.plan
    yield from (_line(label, text) for label, text in stage_lines(report.stages))
    if not report.stages:
        cost = f"{plan.days.shown(days_text)}, {hours_text(plan.gpu_hours)} GPU-hours"
        yield _line("run", f"{plan.tokens:,} tokens: {cost}")
    if report.price is not None:
        yield _line("money", money_text(plan, report.price, report.stages))
    if report.failures is not None and not report.stages:
        yield _line("failures", _failures(report.failures, report.price))


def as_json(report: Report) -> dict[str, Any]:
    """The plan as one JSON object; a number with an interval is {"low", "typical", "high"}."""
    planned, plan, memory = report.planned, report.plan, report.plan.memory
    topology = planned.run.topology
    change = report.change
    return {
        "answer": {
            "fits": fits_text(memory),
            "check": None if report.training is None else check_text(report.training),
            "trust": trust_text(planned),
        },
        "machine": planned.machine.name,
        "calibrated": planned.machine.calibrated,
        "nodes": planned.nodes,
        "layout": {
            "text": planned.run.layout,
            **{axis: getattr(topology, axis) for axis in ("pp", "dp", "cp", "tp", "ep")},
        },
        "expert_load": asdict(_load(planned)),
        "memory": {
            "peak": memory.peak.plain(),
            "reserved": memory.reserved and memory.reserved.plain(),
            "device": memory.device,
            "fits": memory.fits,
            "pp_rank": memory.pp_rank,
            "phase": memory.phase,
            "phases": memory.phases,
            "host": memory.host,
            "node": asdict(memory.node),
        },
        "step_s": plan.step_s.plain(),
        "parts_s": {name: each.plain() for name, each in plan.step.items()},
        "split_s": {name: each.plain() for name, each in plan.split.items()},
        "tokens": plan.tokens,
        "tokens_per_s": plan.tokens_per_s.plain(),
        "best_published_tokens_per_s": None if report.best is None else report.best.plain(),
        "mfu": None if plan.mfu is None else plan.mfu.plain(),
        "days": plan.days.plain(),
        "gpu_hours": plan.gpu_hours.plain(),
        "money": None if report.price is None else money_of(plan.gpu_hours, report.price).plain(),
        "failures": None
        if report.failures is None
        else {
            "goodput": report.failures.goodput,
            "mtbf_s": report.failures.mtbf_s,
            "interval_s": report.failures.interval_s,
            "days": report.failures.days.plain(),
            "gpu_hours": report.failures.gpu_hours.plain(),
        },
        "constraint": {"kind": plan.constraint, "text": plan.binding},
        "change": None if change is None else {"sets": dict(change.sets), "step_s": change.step_s, "peak": change.peak},
        "fewest_nodes": None if report.nodes is None else {"nodes": report.nodes[0], "sets": report.nodes[1]},
        "notes": notes_of(planned),
        "intervals": intervals_from(planned.machine),
        "stages": stages_json(report.stages),
        "laws": None if report.training is None else laws_json(report.training),
    }


def intervals_from(machine: Machine) -> str:
    """The source of the intervals, in one sentence."""
    if machine.scored is not None:
        runs = len(machine.scored.runs)
        rates = f"the spread of {runs} run{'s' if runs > 1 else ''} on {machine.scored.device}, {machine.scored.date}"
    elif machine.measured is not None:
        rates = f"the spread of repeated measurements on {machine.measured.device}, {machine.measured.date}"
    else:
        rates = "published figures and assumptions (sources in the machine's file; --calibrate measures)"
    return (
        f"of times: all rates at the ends of their ranges, from {rates}; of memory: 5 % of the formulas, and overhead"
    )


def _load(planned: PlannedRun) -> ExpertLoad:
    return expert_load(planned.run, planned.costs.widths)


def _machine(planned: PlannedRun) -> str:
    machine, nodes, ranks = planned.machine, planned.nodes, planned.run.topology.world_size
    kind = "calibrated" if machine.calibrated else "not calibrated"
    where = f"{nodes} node{'s' if nodes > 1 else ''} of {machine.devices_per_node}"
    return f"{machine.name}, {kind}: {ranks} rank{'s' if ranks > 1 else ''} on {where}"


def _memory(report: Report) -> Iterator[str]:
    memory = report.plan.memory
    rank = f" of pipeline rank {memory.pp_rank}, which needs most," if report.planned.run.topology.pp > 1 else ""
    yield _line(
        "memory",
        f"peak{rank} {memory.peak.shown(shown_bytes)} of {shown_bytes(memory.device)}, in the phase {memory.phase}:"
        f" {memory.verdict}",
    )
    for name, kinds in memory.phases.items():
        shown = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in kinds.items() if size >= 1e6)
        yield _line("", f"{name} {shown_bytes(sum(kinds.values()))}: {shown}")
    if memory.reserved is not None:
        yield _line("", f"torch's allocator reserves {memory.reserved.shown(shown_bytes)}, and frees it when it must")
    if memory.host:
        yield _line("", f"host memory of a rank under offload {shown_bytes(memory.host)}")
    node = memory.node
    if node.memory:
        used = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in node.memory.items())
        yield _line("host", f"memory of a node {_against(sum(node.memory.values()), node.memory_bytes)}: {used}")
    if node.disk:
        yield _line("", f"local disks of a node {_against(node.disk, node.disk_bytes)}")


def _against(used: float, known: float | None) -> str:
    """A size beside the capacity, and whether the size fits."""
    if known is None:
        return f"{shown_bytes(used)} (the machine's file does not give a node's memory: host in it)"
    return f"{shown_bytes(used)} of {shown_bytes(known)}, {'fits' if used <= known else 'does not fit'}"


def _helps(report: Report) -> Iterator[str]:
    change, plan = report.change, report.plan
    if change is not None:
        gain = plan.step_s.typical / change.step_s - 1
        speed = f"{gain:+.0%} tokens/s" if plan.memory.fits else f"a step of {seconds_text(change.step_s)}"
        yield _line("would help", f"{change} ({speed}, a peak of {shown_bytes(change.peak)})")
    elif not plan.memory.fits:
        yield _line("would help", "no change of one or two settings on these nodes")
    else:
        yield _line("would help", "no change of one setting of the layout")
    if report.nodes is not None:
        nodes, sets = report.nodes
        yield _line("fewest nodes", f"{nodes} of these would hold it, e.g. --nodes {nodes} {as_sets(sets)}")


def money_text(plan: Plan, price: float, stages: Sequence[PlannedStage] = ()) -> str:
    """The cost of a run, or of all its stages, at a price per GPU-hour, with its interval."""
    hours = total_of(stages, "gpu_hours") if stages else plan.gpu_hours
    return f"{money_of(hours, price).shown(lambda each: f'{each:,.0f}')} at {price:g} an hour"


def money_of(gpu_hours: Interval, price: float) -> Interval:
    """The cost of GPU-hours at a price per GPU-hour."""
    return gpu_hours.map(lambda each: each * price)


def _failures(failures: UnderFailures, price: float | None) -> str:
    money = "" if price is None else f", {money_of(failures.gpu_hours, price).typical:,.0f} in money"
    return (
        f"one in {failures.mtbf_s / 3600:,.1f} h at Llama 3's rate per node: {failures.goodput:.1%} goodput with a"
        f" checkpoint each {failures.interval_s / 60:,.0f} min, so {days_text(failures.days.typical)},"
        f" {failures.gpu_hours.typical:,.1f} GPU-hours{money}"
    )


def _more(training: Training, share: float = 0.1) -> str:
    """The gain in loss from a tenth more tokens, time and money, in words."""
    gain = chinchilla_loss(training.parameters, training.tokens)
    gain -= chinchilla_loss(training.parameters, (1 + share) * training.tokens)
    return f"{share:.0%} more tokens, time and money: {gain:.3f} nats less by the Chinchilla law"


def _line(label: str, text: str) -> str:
    return f"{label:>14}  {text}"
