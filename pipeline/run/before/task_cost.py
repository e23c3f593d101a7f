"""Cost of the tasks of an evaluation, before the run starts: for `headrace check` and the first lines of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.run.before.summary import Entry

if TYPE_CHECKING:
    from pipeline.evaluation.tasks.encode import EncodedTask
    from pipeline.run.prepare import PreparedRun

_FORWARD_SHARE = 3
"""FLOPs of a training step, in units of forward passes: the backward pass counts as two (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1)."""


@dataclass(frozen=True)
class TaskCost:
    """Cost of one evaluation of a task, on all ranks together.

    Attributes:
        samples: number of questions.
        requests: number of sequences that are scored or continued.
        tokens: number of tokens of the requests, including new tokens.
        passes: number of sequential forward passes of each rank.
        positions: number of computed positions, padding included.
        steps: number of training steps with the same FLOPs.
        truncated: number of requests whose context was truncated.
    """

    samples: int
    requests: int
    tokens: int
    passes: int
    positions: int
    steps: float
    truncated: int


def task_cost(prepared: PreparedRun, task: EncodedTask) -> TaskCost:
    """Computes the cost of a task of a run."""
    from pipeline.evaluation.tasks.passes import forward_passes, positions  # noqa: PLC0415
    from pipeline.run.task_evaluation import pass_shape  # noqa: PLC0415

    passes = forward_passes(task.lengths, pass_shape(prepared.run))
    count = len(passes) * (task.section.new_tokens if task.generated else 1)
    computed = positions(passes)
    steps = computed / _FORWARD_SHARE / prepared.run.batch.tokens
    tokens, requests = int(task.lengths.sum()), len(task.ids)
    return TaskCost(len(task.questions), requests, tokens, count, computed, steps, task.truncated)


def task_entries(prepared: PreparedRun) -> Iterator[Entry]:
    """Yields the cost of each task, and the share of the run that all evaluations take."""
    total = 0.0
    for task in prepared.tasks:
        cost = task_cost(prepared, task)
        total += cost.steps
        kind = "continuations" if task.generated else "requests"
        text = (
            f"{task.name}: {cost.samples:,} samples, {cost.requests:,} {kind}, {cost.tokens:,} tokens"
            f" ({cost.positions / cost.tokens - 1:.0%} padding), {cost.passes:,} forward passes per rank"
        )
        text += f", {cost.truncated:,} truncated on the left" if cost.truncated else ""
        yield Entry(
            "task", f"{text}: the arithmetic of {cost.steps:.2g} training steps", vars(cost) | {"name": task.name}
        )
    if prepared.tasks:
        run = prepared.run
        section, steps, tokens = run.config.evaluation, run.steps, run.accounts.tokens(run.steps)
        times = -(-tokens // section.every_tokens) if section.every_tokens else -(-steps // (section.every or steps))
        share = times * total / (steps + times * total)
        text = f"{times:,} evaluations: about {share:.1%} of the run's arithmetic"
        if any(task.generated for task in prepared.tasks):
            text += "; a continued token is a forward pass of its own, which costs more time than its arithmetic"
        yield Entry("tasks", text, {"evaluations": times, "share": share})


def task_lines(prepared: PreparedRun) -> Iterator[str]:
    """Yields the entries of the tasks as lines for the start of a run."""
    yield from (f"{entry.label} {entry.text}" for entry in task_entries(prepared))
