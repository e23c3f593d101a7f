"""The gate of a pruned model: every consumer has to read the folder alike; how far it is from the original is recorded.

A pruned model predicts other things than its original, and mostly is trained again, so that no bound says whether it
is right. Whether a consumer computes what the folder says does not depend on that: its figures are bounded beside
those of transformers on the same folder. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

from headrace.base.directory import MANIFEST, read_manifest
from pipeline.evaluation.consumers.bounds import Bound, bound_of
from pipeline.evaluation.consumers.consumer import ConsumerPlan
from pipeline.evaluation.consumers.gate import GateSample, Say, judged, refusal, score_original
from pipeline.evaluation.consumers.request import ScoreRequest, Scores

NO_BOUND = Bound(inf, inf)
"""Any finite figure is within it."""


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
) -> dict[str, Any]:
    """Scores a pruned model by its consumers.

    Args:
        original: Hugging Face folder of the model that was pruned.
        result: the pruned folder.
        scheme: dtype of its weights, whose bound holds between consumers.
        sample: what is scored.
        vocabulary: V of both.
        consumers: which are run.
        say: takes lines for people.
        reference: reads the original's scores of the sample, where it has been scored already.

    Returns:
        For the manifest: consumer -> its figures beside the original's, with `mean_kl_to_transformers` on the same
        folder; or {"not_run": reason}.

    Raises:
        DataError: a consumer fails, its tokenizer gives other ids, its figures are not finite, or it is further from
            transformers on the same folder than the bound of the dtype.
    """
    expected = reference() if reference else score_original(original, sample, vocabulary=vocabulary)
    say("scoring with transformers")
    own = score_original(result, sample, vocabulary=vocabulary)
    figures: dict[str, Any] = {name: {"not_run": reason} for name, reason in consumers.not_run.items()}
    wrong: list[str] = []
    for consumer in consumers.run:
        scores = own
        if consumer.name != "transformers":
            say(f"scoring with {consumer.name}")
            scores = consumer.score(ScoreRequest(result, sample.windows, sample.texts, vocabulary))
        found, broken = judged(scores, expected, sample, NO_BOUND)
        beside, unlike = judged(scores, own, sample, bound_of(scheme))
        figures[consumer.name] = {**found, "mean_kl_to_transformers": beside["mean_kl"]}
        wrong += [f"{consumer.name}: {each}" for each in broken]
        wrong += [f"{consumer.name} beside transformers on the same folder: {each}" for each in unlike]
    if wrong:
        raise refusal(result, wrong, remedy="another dtype, or leave that consumer out")
    return dict(sorted(figures.items()))
