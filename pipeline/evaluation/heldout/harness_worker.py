"""Tasks of lm-evaluation-harness on one model: `harness_worker JOB.json OUT.json`."""

from __future__ import annotations

import json
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from foundation.directory import write_json
from pipeline.models.folder.loading import load_model, pick_device
from pipeline.models.tokenizer_files import load_tokenizer

_BOOTSTRAP = 1000  # resamplings for the standard errors of metrics other than means


def main(given: str, out: str) -> None:
    """Writes the results, or the names of unknown tasks."""
    job = json.loads(Path(given).read_text())
    manager = TaskManager(include_path=job["task_folder"])
    unknown = [name for name in job["tasks"] if not manager.match_tasks([name])]
    if unknown:
        write_json(Path(out), {"unknown": unknown, "near": get_close_matches(unknown[0], manager.all_tasks)})
        return
    device = pick_device()
    model = load_model(Path(job["model"]), device=device)
    tokenizer = load_tokenizer(Path(job["model"]))
    served = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=job["batch_size"], device=str(device))
    how = {"num_fewshot": job["shots"], "limit": job["limit"], "bootstrap_iters": _BOOTSTRAP, "log_samples": False}
    found = simple_evaluate(served, tasks=job["tasks"], task_manager=manager, **how)
    assert found is not None, "this is the only process"
    write_json(Path(out), {task: _task(task, found) for task in found["results"]})


def _task(task: str, found: dict[str, Any]) -> dict[str, Any]:
    """Metrics of a task; the library names them `metric,filter` and `metric_stderr,filter`."""
    values = found["results"][task]
    metrics = {}
    for key, value in values.items():
        name, _, kept = key.partition(",")
        if not kept or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = values.get(f"{name}_stderr,{kept}")
        label = name if kept == "none" else f"{name} ({kept})"
        metrics[label] = {"value": value, "stderr": stderr if isinstance(stderr, float) else None}
    counted = found.get("n-samples", {}).get(task, {}).get("effective", 0)
    about = {"shots": found.get("n-shot", {}).get(task), "version": found.get("versions", {}).get(task)}
    return {"metrics": metrics, "documents": counted, **about}


if __name__ == "__main__":
    main(*sys.argv[1:])
