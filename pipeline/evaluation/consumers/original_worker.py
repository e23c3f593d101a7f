"""Evaluates a Hugging Face folder and scores a sample with it, loaded once: the process of `scored_original`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from foundation.cli import guarded
from foundation.directory import write_json
from foundation.section import parse
from pipeline.evaluation.consumers.original import DATA, MEASURED
from pipeline.evaluation.consumers.request import JOB
from pipeline.evaluation.consumers.transformers_worker import served
from pipeline.evaluation.consumers.worker import job_of_command_line, serve
from pipeline.evaluation.heldout.command import evaluate_folder
from pipeline.evaluation.heldout.data import HeldOutData, open_heldout
from pipeline.models.folder.model_folder import ModelFolder


def main() -> int:
    """Runs the job that the command line names."""
    job = job_of_command_line()
    folder = ModelFolder.open(Path(json.loads((job / JOB).read_text())["model"]))
    data = parse(HeldOutData, json.loads((job / DATA).read_text()), at="data")

    def show(done: int, every: int) -> None:
        print(f"progress {done} {every}", flush=True)

    model, measured = evaluate_folder(folder, data, open_heldout(data, folder), progress=show)
    write_json(job / MEASURED, measured)
    serve(job, lambda path: served(model, path))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
