"""Code that the workers of all consumers share: reading a job, and writing the scores row by row.

Only numpy and the standard library, because a consumer may be in an environment without headrace. The file then runs
from its place, beside the worker's file.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Score = Callable[[Any], Any]
"""Function of token ids [T]: returns logits or log-probabilities [T - 1 or T, at least V]; a further row is ignored."""
Generate = Callable[[list[list[int]], int], Sequence[Sequence[int]]]
"""Function of prompts of equal length [B][P] and N: returns each prompt's N next ids by greedy decoding, [B][N]."""

_WARMUP_TOKENS = 2


class Served(NamedTuple):
    """A loaded model.

    Attributes:
        version: version of the consumer.
        tokenize: text -> ids, without special tokens.
        score: function that returns a window's log-probabilities.
        generate: function that returns the next tokens of prompts.
    """

    version: str
    tokenize: Callable[[str], Sequence[int]]
    score: Score
    generate: Generate


def serve(job: Path, load: Callable[[str], Served]) -> None:
    """Runs a job: first generation, while memory is as after loading, then the windows.

    Args:
        job: directory of the job.
        load: loads the model of a folder.
    """
    about = json.loads((job / "job.json").read_text())
    windows = np.load(job / "windows.npy")
    model = load(about["model"])
    ids = [[int(each) for each in model.tokenize(text)] for text in about["texts"]]
    generated = [_timed(model.generate, about["generation"], batch) for batch in about["generation"]["batches"]]
    samples = [_sample(model, text, about["sample_tokens"]) for text in about["samples"]]
    seconds = _score(job, model.score, windows, about)
    result = {"version": model.version, "ids": ids, "seconds": seconds, "threads": threads()}
    (job / "result.json").write_text(json.dumps({**result, "generation": generated, "samples": samples}))


def _score(job: Path, score: Score, windows: Any, about: dict[str, Any]) -> float:
    """Writes the targets' log-probabilities of every window, and all of the kept windows; returns the seconds."""
    count, length = windows.shape
    kept = {number: row for row, number in enumerate(about["kept"])}
    shape = (len(kept), length - 1, about["vocabulary"])
    out = np.lib.format.open_memmap(job / "log_probabilities.npy", mode="w+", dtype=np.float32, shape=shape)
    targets = np.empty((count, length - 1), dtype=np.float32)
    began = time.perf_counter()
    for number, window in enumerate(windows):
        found = log_softmax(np.asarray(score(window))[: length - 1, : about["vocabulary"]])
        targets[number] = found[np.arange(length - 1), window[1:]]
        if number in kept:
            out[kept[number]] = found
        print(f"progress {number + 1} {count}", flush=True)
    out.flush()
    seconds = time.perf_counter() - began
    np.save(job / "targets.npy", targets)
    return seconds


def _timed(generate: Generate, about: dict[str, Any], batch: int) -> dict[str, Any]:
    """Times greedy decoding after a warmup: tokens/s, prompt included, and the largest resident set."""
    prompts, tokens = about["prompts"][:batch], about["new_tokens"]
    generate(prompts, _WARMUP_TOKENS)
    own = _forget_peak()
    began = time.perf_counter()
    generate(prompts, tokens)
    seconds = time.perf_counter() - began
    found = {"batch": batch, "prompt_tokens": len(prompts[0]), "new_tokens": tokens, "seconds": seconds}
    return {**found, "tokens_per_second": batch * tokens / seconds, "peak_bytes": _peak_bytes(), "peak_of_batch": own}


def _sample(model: Served, text: str, tokens: int) -> list[int]:
    return [int(each) for each in model.generate([[int(each) for each in model.tokenize(text)]], tokens)[0]]


def _forget_peak() -> bool:
    """Resets the kernel's high-water mark (Linux, proc(5), clear_refs); returns False where that is impossible."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_bytes() -> int:
    """The largest resident set of this process, in bytes, since its start or the last `_forget_peak`."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def threads() -> int:
    """Number of threads for every consumer: OMP_NUM_THREADS, or the cores that the process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    affinity = getattr(os, "sched_getaffinity", None)
    return int(given) if given.isdigit() and int(given) else (len(affinity(0)) if affinity else os.cpu_count() or 1)


def log_softmax(logits: Any) -> Any:
    """Log-probabilities float32 [rows, V], computed in float64; log-probabilities stay unchanged."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return (wide - np.log(np.exp(wide).sum(-1, keepdims=True))).astype(np.float32)


def job_of_command_line() -> Path:
    """The job's directory, the only argument."""
    return Path(sys.argv[1])
