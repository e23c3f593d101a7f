"""What the workers of all consumers share: reading a job, and writing the scores row by row.

Only numpy and the standard library, because a consumer may live in an environment without headrace: the file is then
run from where it is, beside the worker's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Score = Callable[[Any], Any]
"""Token ids [T] -> logits or log-probabilities [T - 1 or T, at least V]; a further row is ignored."""


def serve(job: Path, load: Callable[[str], tuple[str, Callable[[str], Sequence[int]], Score]]) -> None:
    """Scores a job.

    Args:
        job: its directory.
        load: takes the model's folder; returns the version, a tokenizer, and what scores a window.
    """
    about = json.loads((job / "job.json").read_text())
    windows = np.load(job / "windows.npy")
    version, tokenize, score = load(about["model"])
    ids = [[int(each) for each in tokenize(text)] for text in about["texts"]]
    count, length = windows.shape
    shape = (count, length - 1, about["vocabulary"])
    out = np.lib.format.open_memmap(job / "log_probabilities.npy", mode="w+", dtype=np.float32, shape=shape)
    began = time.perf_counter()
    for number, window in enumerate(windows):
        out[number] = log_softmax(np.asarray(score(window))[: length - 1, : about["vocabulary"]])
        print(f"progress {number + 1} {count}", flush=True)
    out.flush()
    result = {"version": version, "ids": ids, "seconds": time.perf_counter() - began}
    (job / "result.json").write_text(json.dumps(result))


def log_softmax(logits: Any) -> Any:
    """float32 [rows, V], computed in float64; log-probabilities stay what they are."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return (wide - np.log(np.exp(wide).sum(-1, keepdims=True))).astype(np.float32)


def job_of_command_line() -> Path:
    """The job's directory, the only argument."""
    return Path(sys.argv[1])
