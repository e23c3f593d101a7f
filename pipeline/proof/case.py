"""What is run to prove a layout, and what came of it: plain values that travel between processes as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """One training run from its first step to its last.

    Attributes:
        name: of a directory; unique among the cases of a launch.
        config: a whole run's config, as JSON; `run.dir` is replaced.
        processes: of this machine.
        save: steps after which the state is written.
        again: name of a case before this one, and a step after which it was saved: when this one has ended, its engine
            takes that state and does the steps after it once more.
    """

    name: str
    config: dict[str, Any]
    processes: int = 1
    save: tuple[int, ...] = (1,)
    again: tuple[str, int] | None = None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Case:
        """The inverse of `dataclasses.asdict`."""
        again = fields["again"]
        return cls(**{**fields, "save": tuple(fields["save"]), "again": tuple(again) if again else None})


@dataclass(frozen=True)
class CaseResult:
    """What a case gave.

    Attributes:
        directory: of the case: `step-N` holds the state after step N, `rank-N.log` what a rank said.
        losses: step -> loss.
        norms: step -> gradient norm before clipping.
        again: step -> loss of the steps that were done once more, from another case's state.
        heldout: cross-entropy per target of held-out data after the last step.
        layout: in words.
        seconds: from the start of its processes to their end.
        cpu_seconds: of all of them.
        failed: the last lines of the rank that failed; None when all went well.
    """

    directory: Path
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    again: dict[int, float] = field(default_factory=dict)
    heldout: float | None = None
    layout: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    failed: str | None = None

    def state(self, step: int) -> Path:
        """The state that was saved after a step."""
        return self.directory / f"step-{step}"


def write_cases(cases: Sequence[Case], path: Path) -> None:
    """Writes cases as JSON."""
    path.write_text(json.dumps([asdict(case) for case in cases]))


def read_cases(path: Path) -> list[Case]:
    """Reads what `write_cases` wrote."""
    return [Case.from_json(fields) for fields in json.loads(path.read_text())]


def write_outcome(outcome: CaseResult) -> None:
    """Writes an outcome into its directory."""
    fields = {**asdict(outcome), "directory": str(outcome.directory)}
    (outcome.directory / "outcome.json").write_text(json.dumps(fields))


def read_outcome(directory: Path) -> CaseResult:
    """Reads what `write_outcome` wrote."""
    fields = json.loads((directory / "outcome.json").read_text())
    for name in ("losses", "norms", "again"):
        fields[name] = {int(step): value for step, value in fields[name].items()}
    return CaseResult(**{**fields, "directory": directory})
