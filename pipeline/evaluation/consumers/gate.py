"""The gate of a compression: every consumer scores the written files, which get their final name only within the bound.

The reference is the original model in floating point, scored by transformers. A consumer's figures therefore include
the compression and the consumer's own arithmetic, as in serving.

A pruned model predicts other tokens than its original and is usually trained again: no bound says whether it is right,
and its distance from the original is only recorded. Whether a consumer computes what the folder says can still be
tested: its figures are bounded against those of transformers on the same folder.

No torch here: every score comes from another process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from foundation.directory import MANIFEST, final_name, read_manifest
from foundation.errors import DataError
from foundation.task_figures import Figures
from pipeline.data.dataset import TokenDataset, choose_windows
from pipeline.evaluation.consumers import remedies
from pipeline.evaluation.consumers.bounds import Bound, bound_of, broken_bounds
from pipeline.evaluation.consumers.compare import compare
from pipeline.evaluation.consumers.consumer import CONSUMERS, ConsumerPlan
from pipeline.evaluation.consumers.request import ScoreRequest, Scores, windows_that_fit
from pipeline.evaluation.consumers.texts import texts_of

LIMIT_BYTES = 512 << 20
"""Largest size of one consumer's log-probabilities, in bytes; those of two consumers are in memory at a time."""
POSITIONS = 4096
"""Number of positions to compare, where the vocabulary is small enough for LIMIT_BYTES."""

_NO_BOUND = Bound(inf, inf)
"""A bound that admits any finite figure."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class GateSample:
    """The sample that all consumers score.

    Attributes:
        windows: token ids, int64 [n, T].
        texts: texts that every consumer tokenizes.
    """

    windows: npt.NDArray[np.int64]
    texts: tuple[str, ...]

    @classmethod
    def of(
        cls,
        dataset: TokenDataset,
        model: Path,
        *,
        vocabulary: int,
        longest: int | None = None,
        positions: int = POSITIONS,
    ) -> GateSample:
        """Takes windows evenly spread over a held-out split, and texts: those of windows, and awkward ones.

        Args:
            dataset: the split, with its sequence length.
            model: folder with the tokenizer.
            vocabulary: V of the model.
            longest: number of positions of the model, None for no limit; vLLM generates one token after a window.
            positions: largest number of positions that are scored.
        """
        length = dataset.sequence_length + 1
        if longest is not None:
            length = min(length, longest - 1)
        count = windows_that_fit(
            length=length, vocabulary=vocabulary, limit_bytes=LIMIT_BYTES, limit_positions=positions
        )
        windows = dataset.read(choose_windows(dataset.windows, count))[:, :length].astype(np.int64)
        return cls(windows, texts_of(model, windows))


def score_original(model: Path, sample: GateSample, *, vocabulary: int) -> Scores:
    """Scores the reference: the original in floating point, by transformers.

    Raises:
        DataError: the original cannot be loaded.
    """
    return CONSUMERS["transformers"].score(ScoreRequest(model, sample.windows, sample.texts, vocabulary))


def run_gate(
    original: Path,
    result: Path,
    *,
    bound: Bound,
    sample: GateSample,
    vocabulary: int,
    consumers: ConsumerPlan,
    say: Say = lambda _line: None,
    reference: Callable[[], Scores] | None = None,
) -> Figures:
    """Scores a compressed model with its consumers.

    Args:
        original: Hugging Face folder of the model in floating point.
        result: directory of the compressed model.
        bound: bound for the result's scheme.
        sample: windows and texts that all consumers score.
        vocabulary: V of the original.
        consumers: consumers to run.
        say: prints a line for people.
        reference: function that reads the original's scores of the sample; None if it has not been scored yet.

    Returns:
        For the manifest: consumer -> its figures, or {"not_run": reason}.

    Raises:
        DataError: a consumer fails, its tokenizer gives other ids, or its figures are outside the bound: the message
            names the figures, the layers that lose most, and the config keys to change.
    """
    expected = reference() if reference else score_original(original, sample, vocabulary=vocabulary)
    figures: Figures = {name: {"not_run": reason} for name, reason in consumers.not_run.items()}
    wrong: dict[str, list[str]] = {}
    for consumer in consumers.run:
        say(f"scoring with {consumer.name}")
        scores = consumer.score(ScoreRequest(result, sample.windows, sample.texts, vocabulary))
        figures[consumer.name], broken = judged(scores, expected, sample, bound)
        wrong |= {consumer.name: [f"{consumer.name}: {each}" for each in broken]} if broken else {}
    if wrong:
        rows = attribution(original, result)
        worst = next((name for name, _ in rows if name.rpartition(".")[2].isdigit()), None)
        remedy = remedies.of_quantization(figures, tuple(wrong), scheme=bound.scheme, worst=worst)
        raise _refusal(result, [*chain(*wrong.values()), _attribution_text(rows)], figures, tuple(wrong), remedy)
    return dict(sorted(figures.items()))


def is_pruned(model: Path) -> bool:
    """Whether a model directory was written by `headrace prune`."""
    return (model / MANIFEST).is_file() and "pruning" in read_manifest(model, kind="model").details


def run_pruned_gate(
    original: Path,
    result: Path,
    *,
    scheme: str,
    sample: GateSample,
    vocabulary: int,
    consumers: ConsumerPlan,
    say: Say = lambda _line: None,
    reference: Callable[[], Scores] | None = None,
) -> Figures:
    """Scores a pruned model with its consumers.

    Args:
        original: Hugging Face folder of the model that was pruned.
        scheme: dtype of the result's weights, whose bound applies between consumers.
        result, sample, vocabulary, consumers, say, reference: the arguments of `run_gate`.

    Returns:
        For the manifest: consumer -> its figures beside the original's, with `mean_kl_to_transformers` on the same
        folder; or {"not_run": reason}.

    Raises:
        DataError: a consumer fails, its tokenizer gives other ids, its figures are not finite, or they differ from
            transformers' on the same folder by more than the dtype's bound.
    """
    expected = reference() if reference else score_original(original, sample, vocabulary=vocabulary)
    say("scoring with transformers")
    own = score_original(result, sample, vocabulary=vocabulary)
    figures: Figures = {name: {"not_run": reason} for name, reason in consumers.not_run.items()}
    wrong: dict[str, list[str]] = {}
    for consumer in consumers.run:
        scores = own
        if consumer.name != "transformers":
            say(f"scoring with {consumer.name}")
            scores = consumer.score(ScoreRequest(result, sample.windows, sample.texts, vocabulary))
        found, broken = judged(scores, expected, sample, _NO_BOUND)
        beside, unlike = judged(scores, own, sample, bound_of(scheme))
        figures[consumer.name] = {**found, "mean_kl_to_transformers": beside["mean_kl"]}
        lines = [f"{consumer.name}: {each}" for each in broken]
        lines += [f"{consumer.name} beside transformers on the same folder: {each}" for each in unlike]
        wrong |= {consumer.name: lines} if lines else {}
    if wrong:
        remedy = remedies.of_pruning(figures, tuple(wrong), scheme=scheme)
        raise _refusal(result, list(chain(*wrong.values())), figures, tuple(wrong), remedy)
    return dict(sorted(figures.items()))


def judged(scores: Scores, reference: Scores, sample: GateSample, bound: Bound) -> tuple[Figures, list[str]]:
    """A consumer's figures for the manifest, and those outside the bound as sentences."""
    found = compare(reference.log_probabilities, scores.log_probabilities, sample.windows)
    different = [n for n, (a, b) in enumerate(zip(reference.ids, scores.ids, strict=True)) if a != b]
    figures = {
        "version": scores.version,
        **asdict(found),
        "texts": len(sample.texts),
        "texts_with_equal_ids": len(sample.texts) - len(different),
    }
    wrong = broken_bounds(found, bound)
    if different:
        first = sample.texts[different[0]]
        count = f"{len(different)} of {len(sample.texts)}"
        wrong.append(f"its tokenizer gives other ids for {count} texts, the first is {first[:60]!r}")
    return figures, wrong


def _refusal(
    result: Path, lines: Sequence[str], figures: remedies.Figures, wrong: Sequence[str], remedy: str
) -> DataError:
    """Makes the error for a result that is not accepted.

    Args:
        result: directory of the result, under its final name or staged.
        lines: reasons.
        figures, wrong: the arguments of `remedies.of_quantization`.
        remedy: advice for a result that is still staged.
    """
    final = final_name(result)
    what = f"{result} was not accepted:" if final is None else f"{final} was not accepted, and was deleted:"
    remedy = remedies.of_verification(figures, wrong) if final is None else remedy
    return DataError("\n  ".join([what, *lines, f"try: {remedy}"]))


def attribution(original: Path, result: Path) -> list[tuple[str, float]]:
    """Finds the layers that lose most: name and KL in nats, largest first; empty if that fails.

    One decoder layer of the original at a time gets the compressed weights; the KL divergence of the output is
    measured.
    """
    with TemporaryDirectory(prefix="headrace-layers-") as folder:
        out = Path(folder) / "layers.json"
        command = [
            sys.executable,
            "-P",
            "-m",
            "pipeline.evaluation.consumers.layers_worker",
            str(original),
            str(result),
            str(out),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not out.is_file():
            return []
        return [(str(name), float(kl)) for name, kl in json.loads(out.read_text())]


def _attribution_text(rows: Sequence[tuple[str, float]]) -> str:
    if not rows:
        return "which layers lose most is not known: that is found for Hugging Face folders"
    shown = ", ".join(f"{name} {kl:.3g}" for name, kl in rows[:5])
    return f"KL in nats with the weights of one part alone compressed, largest first: {shown}"
