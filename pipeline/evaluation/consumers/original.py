"""The original against which a compression is judged: loaded once, evaluated and scored. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import Progress as ProgressBar

from foundation.directory import write_json
from foundation.task_figures import Figures
from pipeline.evaluation.consumers.consumer import Consumer, Progress
from pipeline.evaluation.consumers.gate import GateSample
from pipeline.evaluation.consumers.request import ScoreRequest, Scores
from pipeline.evaluation.heldout.data import HeldOutData
from pipeline.evaluation.heldout.measure import finite

DATA, MEASURED = "data.json", "measured.json"
"""Files in the job's directory: the held-out section, and the figures of the evaluation."""

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
    """The original, evaluated and scored.

    Attributes:
        measured: figures that `pipeline.evaluation.heldout.measure.measure` returns.
        job: directory with its scores, which are too large to be in memory while the model is compressed.
    """

    measured: Figures
    job: Path

    def scores(self) -> Scores:
        """The scores of the sample."""
        return Scores.read(self.job)


@contextmanager
def scored_original(
    model: Path, data: HeldOutData, sample: GateSample, *, vocabulary: int, console: Console
) -> Iterator[Original]:
    """Evaluates and scores a model in one new process, with a progress bar; the scores are deleted afterwards.

    Args:
        model: Hugging Face folder in floating point.
        data: held-out section of the evaluation.
        sample: windows and texts to score.
        vocabulary: V of the model.
        console: console for the progress bar.

    Raises:
        DataError: the model cannot be loaded, or its perplexity is not finite.
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
