"""Runs the references that layouts are compared with, and after the layouts resumes from their saved states.

reference_worker.py CASES.json DIRECTORY. It runs once for all ranks: when each of three ranks ran the reference itself,
that took a fifth of the CPU time (186 s, now 148, for ten layouts).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.engines.layout_worker import (
    LAST,
    SAVED,
    largest_difference,
    layout_directory,
    make_engine,
    reference_case,
    reference_directory,
    resolved,
    train,
)


def run_reference(case: dict[str, Any], directory: Path) -> None:
    """Saves the curve of a case's reference, and its state after step `SAVED`."""
    run = resolved(reference_case(case), processes=1)
    curve = train(run, make_engine(run), first=1, last=case.get("steps", LAST), save=directory)
    torch.save(curve, directory / "curve.pt")


def resume(case: dict[str, Any], directory: Path, losses: list[float]) -> float:
    """Relative difference of the losses of a reference that resumes from a layout's state from rank 0's of the layout.

    Those of every rank have been compared with the reference's own losses.
    """
    run = resolved(reference_case(case), processes=1)
    engine = make_engine(run)
    engine.load(directory)
    return largest_difference(train(run, engine, first=SAVED + 1, last=LAST).losses, losses[SAVED:LAST])


def main() -> None:
    """Runs the references before the layouts, or resumes after them from the state of each that has a result."""
    torch.set_num_threads(1)
    work = Path(sys.argv[2])
    cases, found = json.loads(Path(sys.argv[1]).read_text()), work / "results.jsonl"
    if not found.exists():
        for name, case in cases.items():
            print(name, flush=True)
            if not (work / reference_directory(case)).exists():
                run_reference(case, work / reference_directory(case))
        return
    with (work / "compared.jsonl").open("a") as compared:
        for name, result in (item for line in found.open() for item in json.loads(line).items()):
            print(name, flush=True)
            difference = resume(cases[name], work / layout_directory(name), result.pop("losses"))
            compared.write(json.dumps({name: {**result, "resumed by the reference": difference}}) + "\n")


if __name__ == "__main__":
    main()
