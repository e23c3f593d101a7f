"""The training runs of an equivalence proof and their results: values passed between processes as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foundation.configfile import ConfigTree


@dataclass(frozen=True)
class Case:
    """One training run from its first step to its last.

    Attributes:
        name: name of the case and its directory, unique among the cases of a launch.
        config: a complete run config, as JSON; `run.dir` is replaced.
        processes: number of processes on this machine.
        save: steps after which the state is saved.
        resume_from: name of an earlier case, and a step after which it saved its state. At the end of this case its
            engine loads that state and repeats the following steps.
        noise: relative size of random noise on the initial values; 0 for none.
        resave: whether the state loaded from `resume_from` is saved again at once, after the same step.
        timed: whether the last steps are profiled for the ranks' own times.
    """

    name: str
    config: ConfigTree
    processes: int = 1
    save: tuple[int, ...] = (1,)
    resume_from: tuple[str, int] | None = None
    noise: float = 0.0
    resave: bool = False
    timed: bool = False

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Case:
        """The inverse of `dataclasses.asdict`."""
        source = fields["resume_from"]
        return cls(**{**fields, "save": tuple(fields["save"]), "resume_from": tuple(source) if source else None})


@dataclass(frozen=True)
class CaseResult:
    """Result of a case.

    Attributes:
        directory: directory of the case: `step-N` holds the state after step N, `rank-N.log` the output of a rank.
        losses: step -> loss.
        grad_norms: step -> gradient norm before clipping.
        resumed_losses: step -> loss of the steps repeated from another case's state.
        heldout_loss: cross-entropy per target on held-out data after the last step, nats.
        step_s: step -> seconds of the engine's step on rank 0.
        own_s: each rank's own seconds of a step, without waits for other ranks, the least of the profiled steps.
        layout: description of the layout.
        seconds: wall time from the start of its processes to their end, in seconds.
        cpu_seconds: CPU time of all processes together.
        error: the last lines of output of the rank that failed; None if the case succeeded.
        refusal: error with which a rank refused the run; None if none did.
    """

    directory: Path
    losses: dict[int, float] = field(default_factory=dict)
    grad_norms: dict[int, float] = field(default_factory=dict)
    resumed_losses: dict[int, float] = field(default_factory=dict)
    heldout_loss: float | None = None
    step_s: dict[int, float] = field(default_factory=dict)
    own_s: list[float] = field(default_factory=list)
    layout: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    error: str | None = None
    refusal: str | None = None

    def state(self, step: int) -> Path:
        """Directory of the state saved after a step."""
        return self.directory / f"step-{step}"


def write_cases(cases: Sequence[Case], path: Path) -> None:
    """Writes cases as JSON."""
    path.write_text(json.dumps([asdict(case) for case in cases]))


def read_cases(path: Path) -> list[Case]:
    """Reads the cases that `write_cases` wrote."""
    return [Case.from_json(fields) for fields in json.loads(path.read_text())]


def write_result(result: CaseResult) -> None:
    """Writes a result into its directory."""
    fields = {**asdict(result), "directory": str(result.directory)}
    (result.directory / "outcome.json").write_text(json.dumps(fields))


def read_result(directory: Path) -> CaseResult:
    """Reads the result that `write_result` wrote."""
    fields = json.loads((directory / "outcome.json").read_text())
    for name in ("losses", "grad_norms", "resumed_losses", "step_s"):
        fields[name] = {int(step): value for step, value in fields[name].items()}
    return CaseResult(**{**fields, "directory": directory})
