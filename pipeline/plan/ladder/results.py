"""Results of a ladder: results.json, ladder.svg, and the large run's config with the learning rate that was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foundation.configfile import ConfigTree, merge
from foundation.directory import MANIFEST, read_manifest, write_json
from pipeline.plan.ladder.fit import Points
from pipeline.plan.ladder.learning_rate import Chosen
from pipeline.plan.ladder.left_out import LeftOut
from pipeline.plan.ladder.picture import save_picture
from pipeline.plan.ladder.plan import Ladder
from pipeline.plan.ladder.prediction import LEVEL, PredictionVerdict, judge
from pipeline.plan.ladder.runs import Done, finished_loss

RESULTS, PICTURE, CONFIG = "results.json", "ladder.svg", "config.json"


@dataclass(frozen=True)
class Outcome:
    """A ladder whose runs are finished.

    Attributes:
        ladder: planned ladder.
        done: the runs that were fitted.
        chosen: the outcome of the sweep.
        verdict: the law, and the prediction if there is one.
        measured: the large run's own held-out loss, where it was trained with the same learning rate.
    """

    ladder: Ladder
    done: Sequence[Done]
    chosen: Chosen
    verdict: PredictionVerdict
    measured: float | None

    @property
    def learning_rate(self) -> float:
        """Learning rate of the large run: that of its config times the factor of the sweep."""
        return float(f"{self.ladder.large.run.config.optimizer.params.lr * self.chosen.factor:.3g}")

    @property
    def hit(self) -> bool | None:
        """Whether the measured loss is in the interval; None where either is missing."""
        found = self.verdict.prediction
        if found is None or self.measured is None:
            return None
        return found.low <= self.measured <= found.high


def evaluate(ladder: Ladder, done: Sequence[Done], chosen: Chosen, *, tolerance: float) -> Outcome:
    """Fits the finished runs, and reads the large run's loss if it has been trained."""
    names = [each.run.name for each in done]
    large = ladder.large
    verdict = judge(
        points_of(done), names, parameters=large.counts.multiplied, tokens=large.tokens, tolerance=tolerance
    )
    outcome = Outcome(ladder, done, chosen, verdict, None)
    measured = _measured(large.run.config.run.local_dir, steps=large.run.steps, lr=outcome.learning_rate)
    return Outcome(ladder, done, chosen, verdict, measured)


def points_of(done: Sequence[Done]) -> Points:
    """N, D and losses of the finished runs."""
    counts = [(each.run.rung.counts.multiplied, each.run.tokens, each.loss) for each in done]
    columns = np.array(counts, dtype=np.float64).reshape(-1, 3).T
    return Points(columns[0], columns[1], columns[2])


def write_results(outcome: Outcome) -> None:
    """Writes all files; the config only where the fit may be used."""
    output = outcome.ladder.output
    write_json(output / RESULTS, as_json(outcome))
    save_picture(output / PICTURE, outcome.ladder, outcome.done, outcome.verdict, measured=outcome.measured)
    if outcome.verdict.prediction is None:
        (output / CONFIG).unlink(missing_ok=True)  # an earlier fit may have left one
    else:
        write_json(output / CONFIG, large_config(outcome))


def large_config(outcome: Outcome) -> ConfigTree:
    """The large run's config with the learning rate of the ladder."""
    raw = dict(outcome.ladder.large.raw)
    params = (raw.get("scheduler") or {}).get("params", {})
    given = outcome.ladder.large.run.config.optimizer.params
    changed: ConfigTree = {"optimizer": {"params": given.rates_at(outcome.learning_rate)}}
    if params.get("warmup_max_lr") is not None:
        changed["scheduler"] = {"params": {"warmup_max_lr": outcome.learning_rate}}
    return merge(raw, changed)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The whole outcome as plain JSON."""
    ladder, verdict, large = outcome.ladder, outcome.verdict, outcome.ladder.large
    found = verdict.prediction
    return {
        "large": {
            "parameters": large.counts.multiplied,
            "parameters_non_embedding": large.counts.body,
            "tokens": large.tokens,
            "flops": large.flops,
            "learning_rate": outcome.learning_rate,
        },
        "runs": [_plain(each) for each in outcome.done],
        "share_of_flops": ladder.flops() / large.flops,
        "sweep": {
            "factor": outcome.chosen.factor,
            "at_the_end": outcome.chosen.at_the_end,
            "points": [{"factor": factor, "loss": loss} for factor, loss in outcome.chosen.points],
        },
        "law": None if verdict.law is None else {"form": verdict.law.form, **verdict.law.described()},
        "left_out": [_tested(each) for each in verdict.left_out],
        "usable": found is not None,
        "reasons": list(verdict.reasons),
        "prediction": None
        if found is None
        else {"loss": found.loss, "low": found.low, "high": found.high, "level": LEVEL},
        "measured": outcome.measured,
        "hit": outcome.hit,
    }


def _tested(each: LeftOut) -> Mapping[str, Any]:
    return {
        "form": each.form,
        "rms": each.rms,
        "largest_rung": each.largest,
        "errors": each.errors.tolist(),
        "extrapolations": [
            {"distance": distance, "error": error}
            for distance, error in zip(each.distances.tolist(), each.extrapolated.tolist(), strict=True)
        ],
        "noise": each.noise,
        "growth": each.growth,
    }


def _plain(done: Done) -> Mapping[str, Any]:
    run = done.run
    return {
        "name": run.name,
        "rung": run.rung.name,
        "parameters": run.rung.counts.multiplied,
        "parameters_non_embedding": run.rung.counts.body,
        "tokens": run.tokens,
        "samples_per_step": run.samples,
        "steps": run.steps,
        "learning_rate": run.learning_rate,
        "seed": run.seed,
        "loss": done.loss,
    }


def _measured(run_dir: Path, *, steps: int, lr: float) -> float | None:
    """The large run's loss; None where the run is not finished or had another learning rate."""
    loss = finished_loss(run_dir, steps=steps)
    if loss is None or not (run_dir / MANIFEST).is_file():
        return None
    trained = read_manifest(run_dir, kind="run").config["optimizer"]["params"]["lr"]
    return loss if trained == lr else None
