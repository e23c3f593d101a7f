"""The original that a compression is judged by: loaded once, measured as `headrace eval` does, and scored. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import Progress as ProgressBar

from headrace.base.directory import write_json
from pipeline.evaluation.consumers.consumer import Consumer, Progress
from pipeline.evaluation.consumers.gate import GateSample
from pipeline.evaluation.consumers.request import ScoreRequest, Scores
from pipeline.evaluation.heldout.data import HeldOutData
from pipeline.evaluation.heldout.measure import finite

DATA, MEASURED = "data.json", "measured.json"
"""In the job's directory: how the model is evaluated, and what was found."""

_WORKER = Consumer(
    "transformers",
    "pipeline.evaluation.consumers.original_worker",
    lambda: sys.executable,
    "pip install transformers",
    lambda: None,
    lambda _model: None,
    remedy="mend the original first, as its own message says",
)


@dataclass(frozen=True)
class Original:
    """What is known of the original.

    Attributes:
        measured: as of `pipeline.evaluation.heldout.measure.measure`.
        job: directory with its scores, which are too large to be in memory while the model is compressed.
    """

    measured: dict[str, Any]
    job: Path

    def scores(self) -> Scores:
        """Of the sample."""
        return Scores.read(self.job)


@contextmanager
def scored_original(
    model: Path, data: HeldOutData, sample: GateSample, *, vocabulary: int, console: Console
) -> Iterator[Original]:
    """Evaluates and scores a model in one new process, with a progress bar; the scores are deleted afterwards.

    Args:
        model: Hugging Face folder in floating point.
        data: how it is evaluated.
        sample: what is scored.
        vocabulary: V of the model.
        console: for the progress bar.

    Raises:
        DataError: it cannot be loaded, or its perplexity is not finite.
    """
    with TemporaryDirectory(prefix="headrace-original-") as folder:
        job = Path(folder)
        write_json(job / DATA, data.model_dump(mode="json"))
        console.print(f"{model}: evaluating the original")
        with ProgressBar(*ProgressBar.get_default_columns(), console=console, transient=True) as shown:
            task = shown.add_task("windows")
            show: Progress = lambda done, every: shown.update(task, completed=done, total=every)  # noqa: E731
            _WORKER.run(ScoreRequest(model, sample.windows, sample.texts, vocabulary), job, progress=show)
        yield Original(finite(model, json.loads((job / MEASURED).read_text())), job)
