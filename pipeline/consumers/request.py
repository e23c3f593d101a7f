"""What a consumer is asked to score, and what it answers; a job is a directory that two processes share. No torch.

Shapes: n windows, T tokens each, V entries of the vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.directory import write_json

JOB, WINDOWS, LOG_PROBABILITIES, RESULT = "job.json", "windows.npy", "log_probabilities.npy", "result.json"


@dataclass(frozen=True)
class ScoreRequest:
    """A model and what to score with it.

    Attributes:
        model: a Hugging Face folder, or a directory with model.gguf.
        windows: token ids, int64 [n, T].
        texts: to be tokenized by the consumer's own tokenizer, without special tokens.
        vocabulary: V; entries that a consumer adds behind it are cut off, and the rest is normalized again.
    """

    model: Path
    windows: npt.NDArray[np.int64]
    texts: tuple[str, ...]
    vocabulary: int

    def write(self, job: Path) -> None:
        """Writes the request into the job's directory."""
        job.mkdir(parents=True, exist_ok=True)
        np.save(job / WINDOWS, self.windows)
        about = {"model": str(self.model.absolute()), "texts": list(self.texts), "vocabulary": self.vocabulary}
        write_json(job / JOB, about)


@dataclass(frozen=True)
class Scores:
    """What a consumer found.

    Attributes:
        log_probabilities: float32 [n, T - 1, V], memory-mapped: of the token after each position but the last.
        ids: token ids of each text.
        version: of the consumer.
        seconds: that the windows took, without loading.
    """

    log_probabilities: npt.NDArray[np.float32]
    ids: list[list[int]]
    version: str
    seconds: float

    @classmethod
    def read(cls, job: Path) -> Scores:
        """What a worker wrote into the job's directory."""
        result: dict[str, Any] = json.loads((job / RESULT).read_text())
        found = np.load(job / LOG_PROBABILITIES, mmap_mode="r")
        return cls(found, result["ids"], result["version"], result["seconds"])


def windows_that_fit(*, length: int, vocabulary: int, limit_bytes: int, limit_positions: int) -> int:
    """How many windows can be scored: their log-probabilities stay below a number of bytes.

    Args:
        length: T, tokens per window.
        vocabulary: V.
        limit_bytes: of the float32 log-probabilities [n, T - 1, V].
        limit_positions: of n (T - 1).
    """
    positions = min(limit_positions, limit_bytes // (4 * vocabulary))
    return max(1, positions // max(1, length - 1))
