"""A plan's answer in at most 15 lines: whether it fits, how long it takes, its cost, and how far to trust it."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import shorten

from pipeline.config.load import as_sets
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.plan.laws.law_warnings import Training, shown
from pipeline.plan.laws.laws import Quantity
from pipeline.plan.predict.interval import Interval, days_text, hours_text, seconds_text
from pipeline.plan.predict.memory_plan import MemoryPlan
from pipeline.plan.predict.plan import Plan
from pipeline.plan.predict.planned_run import PlannedRun
from pipeline.plan.search.changes import Change
from pipeline.run.before.memory_summary import shown_bytes
from pipeline.runtime.machines.machine import Machine

MOST_LINES = 15
"""Most lines of an answer."""
NEAR_TIE = 0.05
"""Gain in speed up to which two layouts are shown as nearly equal: plans of published runs err by 7 % in the median."""
_WIDTH = 100
"""Most characters of a note."""
_NOTES = 3
"""Most notes in an answer."""


@dataclass(frozen=True)
class Answer:
    """The figures of a plan that an answer has.

    Attributes:
        planned: the run.
        plan: its plan; of the first stage in a run with stages.
        days: days of the whole run.
        gpu_hours: GPU-hours of the whole run.
        change: change of the layout that would help most; None where none helps.
        nodes: fewest nodes that hold a run that does not fit, and the settings of their layout; None if none do.
        price: price of a GPU-hour; None where it was not given.
        training: hyperparameters for the published laws; None where the laws do not apply.
        stages: number of stages; 0 for a run without stages.
    """

    planned: PlannedRun
    plan: Plan
    days: Interval
    gpu_hours: Interval
    change: Change | None
    nodes: tuple[int, dict[str, object]] | None
    price: float | None
    training: Training | None
    stages: int

    def lines(self) -> list[str]:
        """The answer: a headline, a line per question, and notes that fit in `MOST_LINES`."""
        machine, run, plan = self.planned.machine, self.planned.run, self.plan
        where = f"{self._model()} on {run.topology.world_size} x {machine.name}"
        found = [f"{where}: {brief_layout(run)}, {run.batch.tokens:,} tokens a step"]
        rows = [("fits", self._fits()), ("time", self._time()), ("cost", self._cost())]
        rows += [("limit", plan.binding), ("change", self._change())]
        if self.training is not None:
            rows.append(("check", check_text(self.training)))
        rows.append(("trust", trust_text(self.planned)))
        notes = notes_of(self.planned)
        rows += [("note", shorten(note, _WIDTH, placeholder=" ...")) for note in notes[:_NOTES]]
        found += [f"{label:<7} {text}" for label, text in rows]
        left = len(notes) - _NOTES
        more = f"; {left} more notes" if left > 0 else ""
        return [*found, f"--verbose: memory and step by part, laws, sources{more}; --json: the same numbers"]

    def _model(self) -> str:
        size = self.planned.costs.size
        active = f", {_billions(size.active)} active" if size.active < 0.9 * size.parameters else ""
        return f"{_billions(size.parameters)}{active}"

    def _fits(self) -> str:
        return fits_text(self.plan.memory)

    def _time(self) -> str:
        plan = self.plan
        mfu = "" if plan.mfu is None else f", MFU {plan.mfu.typical:.0%}"
        of = f" in {self.stages} stages; the first:" if self.stages else ":"
        step = f"{seconds_text(plan.step_s.typical)} a step, {plan.tokens_per_s.typical:,.0f} tokens/s{mfu}"
        return f"{self.days.shown(days_text)}{of} {step}"

    def _cost(self) -> str:
        hours = f"{hours_text(self.gpu_hours)} GPU-hours"
        if self.price is None:
            return f"{hours}; --price P for money"
        money = self.gpu_hours.map(lambda each: each * (self.price or 0.0))
        return f"{money.shown(lambda each: f'{each:,.0f}')} at {self.price:g}; {hours}"

    def _change(self) -> str:
        change, plan = self.change, self.plan
        if change is None:
            nodes = "" if self.nodes is None else f"; {self.nodes[0]} nodes would hold it: {as_sets(self.nodes[1])}"
            return f"nothing better by one setting of the layout{nodes}"
        if not plan.memory.fits:
            return f"{change}: fits with {shown_bytes(change.peak)}, {seconds_text(change.step_s)} a step"
        gain = plan.step_s.typical / change.step_s - 1
        tie = ", nearly a tie: plans err by more" if gain < NEAR_TIE else ""
        return f"{change}: {gain:+.0%} tokens/s, a peak of {shown_bytes(change.peak)}{tie}"


def notes_of(planned: PlannedRun) -> list[str]:
    """The plan's assumptions; first, padding, idle ranks and another layout, where the ranks do not fit the config."""
    run, notes = planned.run, list[str]()
    if run.batch.padding_rows:
        why = f"{run.batch.samples} samples do not divide over {run.topology.world_size} ranks"
        notes.append(f"{run.batch.padding_rows} padding rows a step: {why}; other --nodes?")
    if run.spare:
        notes.append(f"{run.spare} ranks are idle: the layout takes {run.topology.world_size}; other --nodes?")
    if run.fallback:
        notes.append(f"Not the config's layout: {run.fallback}.")
    return [*notes, *planned.notes]


def brief_layout(run: ResolvedRun) -> str:
    """The engine, its sharding and the sizes of the axes, e.g. "FSDP2 (ZeRO-3), pp 2 x dp 4"."""
    config, stage = run.config, run.config.zero_optimization.stage
    own = f"FSDP2 (ZeRO-{stage})" if stage else "DDP"
    name = {"deepspeed": f"DeepSpeed ZeRO-{stage}", "reference": "one plain process"}.get(config.engine, own)
    shard, device = config.parallel.hybrid_shard_size, config.zero_optimization.offload_optimizer.device
    parts = [name, str(run.topology), *([config.parallel.schedule] if run.topology.pp > 1 else [])]
    parts += [f"shards of {shard}"] if shard else []
    return ", ".join([*parts, *([f"optimizer on {device}"] if device != "none" else [])])


def fits_text(memory: MemoryPlan) -> str:
    """Whether a run fits: yes only if the upper end of the peak does, with the margin; the host, too."""
    peak, device = memory.peak.map(lambda each: each / 1e9), memory.device / 1e9
    size = f"{peak.shown(lambda each: f'{each:,.1f}')} of {device:,.1f} GB"
    margin = (memory.device - memory.peak.high) / memory.device
    if not memory.fits:
        word = "no"
    elif margin >= 0:
        word = "yes"
    else:
        word = "perhaps"
    left = f"{margin:.0%} free at the upper end" if margin >= 0 else f"the upper end is {-margin:.0%} over"
    return f"{word}: {size}, {left}; {_host(memory)}"


def check_text(training: Training) -> str:
    """The config's batch and learning rate beside the range of the laws."""
    parts = []
    for quantity in (Quantity.BATCH, Quantity.LEARNING_RATE):
        laws = [each.value for each in training.suggestions() if each.quantity is quantity]
        if laws:
            name = "batch" if quantity is Quantity.BATCH else "learning rate"
            parts.append(f"{name} {shown(training.value(quantity))} (laws: {shown(min(laws))} to {shown(max(laws))})")
    return "; ".join(parts)


def trust_text(planned: PlannedRun) -> str:
    """How far plans of published runs like this one were off, or that the machine was calibrated."""
    if planned.machine.calibrated:
        return f"calibrated on {_calibrated_on(planned.machine)}; headrace plan --score compares runs with plans"
    kind = "experts" if planned.costs.widths.all_experts else "dense"
    if not published(planned.run, experts=kind == "experts"):
        return f"no published run of this kind (DeepSpeed, offload, experts without ep); others: {ERRORS[kind]:.0%} off"
    error = f"median error {ERRORS[kind]:.0%}, {_INSIDE[kind]} inside"
    return f"published runs, {kind}: {error}; --calibrate measures yours"


def published(run: ResolvedRun, *, experts: bool) -> bool:
    """Whether published runs of the layout's kind were compared: none of DeepSpeed, offload or experts without ep."""
    offload = run.config.zero_optimization.offload_optimizer.device != "none"
    return run.config.engine == "torch" and not offload and (run.topology.ep > 1 or not experts)


ERRORS = {"dense": 0.07, "experts": 0.18}
"""Kind of model -> median error on published rows that no range was fitted to (docs/reference/planner.md)."""
_INSIDE = {"dense": "98 of 99", "experts": "33 of 42"}


def _calibrated_on(machine: Machine) -> str:
    source = machine.scored or machine.measured
    return "" if source is None else f"{source.device}, {source.date}"


def _host(memory: MemoryPlan) -> str:
    used, known = sum(memory.node.memory.values()), memory.node.memory_bytes
    if not used:
        return "its host's memory is the device's"
    of = "an unknown size" if known is None else f"{known / 1e9:,.0f} GB"
    return f"host memory {used / 1e9:,.0f} GB of {of}" + ("" if memory.node.fits else ", which is too little")


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"
