"""A consumer's request and its scores; a job is a directory that two processes share. No torch.

Shapes: n windows, T tokens each, V entries of the vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foundation.directory import write_json

JOB, WINDOWS, LOG_PROBABILITIES, RESULT = "job.json", "windows.npy", "log_probabilities.npy", "result.json"
TARGETS = "targets.npy"


@dataclass(frozen=True)
class Generation:
    """Generation to be timed, by greedy decoding.

    Attributes:
        prompts: token ids, as many as the largest batch, all of one length.
        batches: numbers of sequences at once.
        new_tokens: number of tokens to generate for each sequence.
    """

    prompts: tuple[tuple[int, ...], ...] = ()
    batches: tuple[int, ...] = ()
    new_tokens: int = 0


@dataclass(frozen=True)
class ScoreRequest:
    """A model, and the windows and texts to score with it.

    Attributes:
        model: a Hugging Face folder, or a directory with model.gguf.
        windows: token ids, int64 [n, T].
        texts: texts to tokenize with the consumer's own tokenizer, without special tokens.
        vocabulary: V; further entries of a consumer are cut off, and the rest is normalized again.
        kept: indices of the windows whose log-probabilities of all tokens are wanted; None for every window.
        generation: generation to be timed; none without batches.
        samples: texts to continue by greedy decoding.
        sample_tokens: new tokens for each of `samples`.
    """

    model: Path
    windows: npt.NDArray[np.int64]
    texts: tuple[str, ...]
    vocabulary: int
    kept: tuple[int, ...] | None = None
    generation: Generation = field(default_factory=Generation)
    samples: tuple[str, ...] = ()
    sample_tokens: int = 0

    def write(self, job: Path) -> None:
        """Writes the request into the job's directory."""
        job.mkdir(parents=True, exist_ok=True)
        np.save(job / WINDOWS, self.windows)
        kept = range(len(self.windows)) if self.kept is None else self.kept
        about = {"model": str(self.model.absolute()), "texts": list(self.texts), "vocabulary": self.vocabulary}
        about |= {"kept": list(kept), "generation": asdict(self.generation)}
        write_json(job / JOB, {**about, "samples": list(self.samples), "sample_tokens": self.sample_tokens})


@dataclass(frozen=True)
class Scores:
    """The results of a consumer.

    Attributes:
        log_probabilities: log-probabilities of the token after each position but the last, float32 [kept, T - 1, V].
        targets: log-probabilities of the next tokens in the windows, float32 [n, T - 1].
        ids: token ids of each text.
        version: version of the consumer.
        seconds: seconds that the windows took, without loading.
        threads: number of threads with which the consumer computed.
        generation: figures of each batch: batch, prompt_tokens, new_tokens, seconds, tokens_per_second, peak_bytes,
            peak_of_batch.
        samples: new token ids of each text.
    """

    log_probabilities: npt.NDArray[np.float32]
    targets: npt.NDArray[np.float32]
    ids: list[list[int]]
    version: str
    seconds: float
    threads: int
    generation: list[dict[str, Any]]
    samples: list[list[int]]

    @classmethod
    def read(cls, job: Path) -> Scores:
        """Reads the results that a worker wrote into the job's directory; the arrays are read into memory."""
        result: dict[str, Any] = json.loads((job / RESULT).read_text())
        return cls(np.load(job / LOG_PROBABILITIES), np.load(job / TARGETS), **result)


def windows_that_fit(*, length: int, vocabulary: int, limit_bytes: int, limit_positions: int) -> int:
    """Number of windows whose log-probabilities are within both limits; at least one.

    Args:
        length: T, tokens per window.
        vocabulary: V.
        limit_bytes: largest size in bytes of the float32 log-probabilities [n, T - 1, V].
        limit_positions: largest number of positions, n (T - 1).
    """
    positions = min(limit_positions, limit_bytes // (4 * vocabulary))
    return max(1, positions // max(1, length - 1))
