"""Lines that `headrace ladder` prints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pipeline.plan.ladder.plan import Ladder
from pipeline.plan.ladder.prediction import LEVEL
from pipeline.plan.ladder.results import CONFIG, PICTURE, RESULTS, Outcome
from pipeline.plan.laws.law_warnings import Training, warnings
from pipeline.plan.laws.laws import Quantity, more_tokens


def line(label: str, text: str) -> str:
    """A line of a summary."""
    return f"{label:>14}  {text}"


def laws_lines(training: Training) -> Iterator[str]:
    """The suggestions of the published laws for a run, beside its own values."""
    yield line(
        "model", f"N = {training.parameters:,} parameters without embedding and head, D = {training.tokens:,} tokens"
    )
    found = training.suggestions()
    for quantity in Quantity:
        yield line(quantity.split(",")[0], f"{shown(training.value(quantity))} in the config")
        for law in (each for each in found if each.quantity is quantity):
            where = "" if law.in_range else "; extrapolated"
            yield line("", f"{shown(law.value)}  {law.law}: {law.formula} ({law.source}; {law.fitted_on}{where})")
    for gain in more_tokens(training.parameters):
        yield line(
            "more tokens",
            f"{gain.per_parameter:g} per parameter: {gain.compute:g} x the compute of 20, loss {gain.loss_change:+.3f}"
            " nats by the Chinchilla law",
        )
    for text in warnings(training):
        yield line("warning", text)


def plan_lines(ladder: Ladder) -> Iterator[str]:
    """Yields lines on the runs of a ladder before any is trained."""
    large = ladder.large
    yield line("large run", f"N = {large.counts.multiplied:,}, D = {large.tokens:,} tokens, {large.flops:.2e} FLOPs")
    for rung in ladder.rungs:
        runs = [run for run in ladder.runs() if run.rung.name == rung.name]
        budgets = ", ".join(f"{run.tokens:,}" for run in runs)
        share = rung.counts.multiplied / large.counts.multiplied
        yield line("rung", f"{rung.name}, N = {rung.counts.multiplied:,} ({share:.1%}), D = {budgets} tokens")
    names = {run.name for run in [*ladder.sweep(), *ladder.runs()]}
    yield line(
        "ladder", f"{len(names)} runs, {ladder.flops() / large.flops:.1%} of the large run's FLOPs, in {ladder.output}"
    )


def outcome_lines(outcome: Outcome) -> Iterator[str]:
    """The law and the prediction, or why there is none."""
    verdict, chosen = outcome.verdict, outcome.chosen
    for factor, loss in chosen.points:
        yield line("learning rate", f"x {factor:g}: {loss:.4f}")
    kept = "the config's is kept" if chosen.factor == 1 else f"the config's times {chosen.factor:.2f}"
    beyond = "; the best is at the end of the sweep, a better one may be beyond" if chosen.at_the_end else ""
    yield line("learning rate", f"{outcome.learning_rate:g} for the large run: {kept}{beyond}")
    for each in outcome.done:
        yield line("run", f"{each.run.name}: {each.loss:.4f}")
    for out in verdict.left_out:
        yield line(
            "left out",
            f"{out.form}: error {out.rms:.2%} of rungs left out, {out.largest:.2%} of the largest;"
            f" noise {out.noise:.2%}, growing by {out.growth * math.log(2):.2%} per doubling of N",
        )
    if verdict.law is not None:
        law = verdict.law.described()
        yield line(
            "law",
            f"L = {law['E']:.3f} + {law['A']:.4g} / N^{law['alpha']:.3f} + {law['B']:.4g} / D^{law['beta']:.3f}"
            f" ({verdict.law.form})",
        )
    yield from _prediction_lines(outcome)
    yield line(
        "written", f"{outcome.ladder.output}: {RESULTS}, {PICTURE}" + (f", {CONFIG}" if verdict.prediction else "")
    )


def _prediction_lines(outcome: Outcome) -> Iterator[str]:
    found = outcome.verdict.prediction
    for reason in outcome.verdict.reasons:
        yield line("not usable", reason)
    if found is not None:
        yield line(
            "prediction", f"held-out loss {found.loss:.3f}, {LEVEL:.0%} interval {found.low:.3f} to {found.high:.3f}"
        )
    if outcome.measured is not None:
        where = {True: ", in the interval", False: ", outside of the interval", None: ""}[outcome.hit]
        error = "" if found is None else f", {outcome.measured / found.loss - 1:+.1%} from the prediction"
        yield line("measured", f"{outcome.measured:.3f} by the large run{error}{where}")


def shown(value: float) -> str:
    """Formats a number of any size."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"
