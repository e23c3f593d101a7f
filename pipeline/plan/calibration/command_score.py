"""`headrace plan --score RUN...`: signed errors of the predictions of trained runs; a calibration from them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from foundation.directory import write_json
from foundation.errors import ConfigError
from pipeline.plan.calibration.fit import fitted
from pipeline.plan.calibration.score import (
    DRIFT,
    PredictionComparison,
    Score,
    machine_of,
    read_measured,
    rescored,
    score,
    worst,
)
from pipeline.run.before.memory_summary import shown_bytes
from pipeline.runtime.machines.machine import Machine

_WIDTH = 120


def score_command(runs: Sequence[str], machine: Machine | None, *, save: str | None, as_json: bool) -> int:
    """Scores runs and prints the errors; with `save`, writes the machine that fits them.

    Args:
        runs: directories of the runs.
        machine: machine that predicts; None for the shipped machine of each run's device.
        save: file of the fitted machine; None for no fit.
        as_json: whether to print one JSON object in the place of the table.

    Raises:
        ConfigError, DataError: a run cannot be scored, or the file already exists.
    """
    _check_target(save)
    measured = [read_measured(path) for path in runs]
    machines = [machine or machine_of(run) for run in measured]
    scores = [score(run, each) for run, each in zip(measured, machines, strict=True)]
    own = fitted(scores, machines[0]) if save else None
    after = [rescored(each.measured, each.planned, own) for each in scores] if own else None
    if own is not None and save:
        write_json(Path(save), own.model_dump(mode="json", exclude_none=True))
    if as_json:
        print(json.dumps(plain(scores, machines, after, save), indent=2))
        return 0
    _print(table(scores))
    for line in _lines(scores, machines, after, save):
        print(line)
    return 0


def plain(
    scores: Sequence[Score], machines: Sequence[Machine], after: Sequence[Score] | None, save: str | None
) -> dict[str, Any]:
    """The scores for JSON, in bytes and seconds; errors are (predicted - measured) / measured."""
    found: dict[str, Any] = {
        "runs": [
            {
                "run": str(each.measured.path),
                "machine": machine.name,
                "layout": each.planned.run.layout,
                "world_size": each.measured.record["world_size"],
                "steps": each.measured.record["steps"],
                "memory_bytes": _plain(each.memory),
                "step_s": {**_plain(each.step), "quartiles": list(each.measured.step_s)},
                "formula_drift": each.drift,
            }
            for each, machine in zip(scores, machines, strict=True)
        ],
        "error": _summaries(scores),
    }
    if after is not None:
        found["calibration"] = {"file": save, "error": _summaries(after)}
    return found


def table(scores: Sequence[Score]) -> Table:
    """A table with one row per run."""
    shown = Table(box=None, pad_edge=False)
    for name in ("run", "layout", *("peak, predicted", "measured", "error"), *("step, predicted", "measured", "error")):
        shown.add_column(name, justify="left" if name in ("run", "layout") else "right", overflow="fold")
    for each in scores:
        shown.add_row(
            str(each.measured.path),
            _layout(each),
            *_cells(each.memory, shown_bytes),
            *_cells(each.step, _seconds),
        )
    return shown


def _layout(each: Score) -> str:
    config = each.planned.run.config
    return f"{config.engine}, stage {config.zero_optimization.stage}, {each.planned.run.topology}"


def _lines(
    scores: Sequence[Score], machines: Sequence[Machine], after: Sequence[Score] | None, save: str | None
) -> Iterator[str]:
    yield f"predicted by {', '.join(dict.fromkeys(each.name for each in machines))}; above 0 the prediction is too high"
    yield _error_line("error", scores)
    for each in scores:
        if each.drift is not None and abs(each.drift) > DRIFT:
            change = f"today's formulas give {each.drift:+.1%} of the memory predicted when the run was trained"
            yield f"note: {each.measured.path}: {change}"
    if after is not None:
        yield f"{save}: written; headrace plan --machine {save} takes it"
        yield _error_line("error of these runs with the new machine file", after)


def _error_line(label: str, scores: Sequence[Score]) -> str:
    found = (
        f"{name} median {statistics.median(errors):+.1%}, worst {worst(errors):+.1%}"
        for name, errors in _errors(scores).items()
    )
    return f"{label}: {'; '.join(found)}"


def _check_target(save: str | None) -> None:
    if save is None:
        return
    path = Path(save)
    if path.exists():
        remedy = "another name, or remove it"
        raise ConfigError("--save-calibration", save, why="it exists, and may hold another calibration", remedy=remedy)
    if path.suffix != ".json":
        raise ConfigError("--save-calibration", save, why="a machine is a JSON file", remedy=f"{path}.json")
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            "--save-calibration", save, why="its directory does not exist", remedy=f"mkdir -p {path.parent}"
        )


def _cells(each: PredictionComparison, text: Any) -> tuple[str, str, str]:
    return text(each.predicted), text(each.measured), f"{each.error:+.1%}"


def _plain(each: PredictionComparison) -> dict[str, float]:
    return {"predicted": each.predicted, "measured": each.measured, "error": each.error}


def _summaries(scores: Sequence[Score]) -> dict[str, dict[str, float]]:
    return {
        name: {"median": statistics.median(errors), "worst": worst(errors)} for name, errors in _errors(scores).items()
    }


def _errors(scores: Sequence[Score]) -> dict[str, list[float]]:
    return {"memory": [each.memory.error for each in scores], "step": [each.step.error for each in scores]}


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"


def _print(shown: Table) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    console.print(shown)
