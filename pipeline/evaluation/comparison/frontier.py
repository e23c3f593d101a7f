"""Measures models side by side, each by a consumer that serves it and in a process of its own.

All rows come from the same windows of held-out tokens. Mean and largest KL divergence and top-1 agreement compare with
the first model. The loss by transformers is that of `headrace eval`; other consumers' loss comes from their
log-probabilities of the same tokens. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from foundation.task_figures import Figures
from pipeline.data.dataset import choose_windows
from pipeline.evaluation.comparison.candidates import ModelCandidate, ModelComparison, Wanted, check, parameters_of
from pipeline.evaluation.comparison.rows import Generated, Row
from pipeline.evaluation.consumers.compare import compare
from pipeline.evaluation.consumers.consumer import CONSUMERS
from pipeline.evaluation.consumers.gate import LIMIT_BYTES
from pipeline.evaluation.consumers.request import Generation, ScoreRequest, Scores, windows_that_fit
from pipeline.evaluation.heldout.data import HeldOutData, count_targets_of_each, loss_by_source, targets_of
from pipeline.evaluation.heldout.measure import measure
from pipeline.runtime.metrics.perplexity import bits_per_byte, perplexity

Say = Callable[[str], None]
Windows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _LossWindows:
    """Windows on which the loss is measured.

    Attributes:
        chosen: indices in the dataset, int64 [n].
        tokens: token ids of the windows, int64 [n, T + 1].
        kept: indices into `chosen` of the windows whose whole distributions are compared.
    """

    chosen: Windows
    tokens: Windows
    kept: Windows


def frontier(
    models: Mapping[str, Path],
    *,
    data: HeldOutData,
    consumers: Sequence[str] | None = None,
    wanted: Wanted | None = None,
    say: Say = lambda _line: None,
) -> list[Row]:
    """Measures models side by side.

    Args:
        models: name -> Hugging Face folder, or directory with model.gguf; the first is the reference.
        data: held-out section; fields not given in it default to the first model's training.
        consumers: names, each of which serves every model of its format; by default transformers for folders and
            llama.cpp for GGUF files.
        wanted: measurements to make beside the loss; None for the defaults.
        say: prints a line for people.

    Returns:
        A row for each model and consumer, in the order of `models`. If a consumer is not installed or cannot take the
        model, its row says so.

    Raises:
        ConfigError, DataError: an input that `check` refuses, before any work; DataError also when a consumer fails.
    """
    return measure_all(check(models, data=data, consumers=consumers, wanted=wanted), say=say)


def measure_all(comparison: ModelComparison, *, say: Say = lambda _line: None) -> list[Row]:
    """Measures checked models; returns their rows.

    Raises:
        DataError: a consumer fails.
    """
    sample = _sample(comparison)
    reference: Scores | None = None
    rows = []
    for number, candidate in enumerate(comparison.candidates, start=1):
        row = Row(
            name=candidate.name,
            path=candidate.path,
            consumer=candidate.consumer,
            scheme=candidate.about.scheme,
            bytes=candidate.weight_bytes,
            parameters=parameters_of(candidate),
            not_run=candidate.not_run,
        )
        count = f"{number}/{len(comparison.candidates)}"
        if row.not_run is None:
            say(f"evaluating {count}: {row.name} ({row.path}) with {row.consumer}")
            scores = _score(candidate, comparison, sample)
            row = replace(row, **_served(scores, comparison), **_loss(candidate, comparison, sample, scores))
            if number == 1:
                reference = scores
            if reference is not None:  # without the first model's scores there is no reference
                row = replace(row, **_compared(reference, scores, sample))
        else:
            say(f"not evaluated {count}: {row.name} with {row.consumer}: {row.not_run}")
        rows.append(row)
    return rows


def _sample(comparison: ModelComparison) -> _LossWindows:
    dataset = comparison.dataset
    chosen = choose_windows(dataset.windows, comparison.data.max_windows)
    limit = {"limit_bytes": LIMIT_BYTES, "limit_positions": comparison.wanted.positions}
    count = windows_that_fit(length=dataset.sequence_length + 1, vocabulary=comparison.vocabulary, **limit)
    return _LossWindows(chosen, dataset.read(chosen).astype(np.int64), choose_windows(chosen.size, count))


def _score(candidate: ModelCandidate, comparison: ModelComparison, sample: _LossWindows) -> Scores:
    """Scores the windows with a consumer, by transformers only the kept windows: its loss is measured separately."""
    windows, kept = sample.tokens, sample.kept
    if candidate.consumer == "transformers":
        windows, kept = windows[kept], np.arange(kept.size)
    request = ScoreRequest(
        candidate.path,
        windows,
        (),
        comparison.vocabulary,
        kept=tuple(kept.tolist()),
        generation=_generation(comparison.wanted, sample.tokens),
        samples=comparison.wanted.prompts,
        sample_tokens=comparison.wanted.sample_tokens,
    )
    return CONSUMERS[candidate.consumer].score(request)


def _generation(wanted: Wanted, tokens: Windows) -> Generation:
    """Prompts from the beginning of windows; prompt and new tokens together stay within the length of a window."""
    if not wanted.batches:
        return Generation()
    length = tokens.shape[1] - 1
    prompt = max(1, min(wanted.prompt_tokens, length // 2))
    rows = tokens[np.arange(max(wanted.batches)) % len(tokens), :prompt]
    new = max(1, min(wanted.new_tokens, length - prompt))
    return Generation(tuple(tuple(row) for row in rows.tolist()), tuple(sorted(wanted.batches)), new)


def _served(scores: Scores, comparison: ModelComparison) -> Figures:
    generation = tuple(Generated(**each) for each in scores.generation)
    samples = _texts(scores.samples, comparison)
    return {"version": scores.version, "threads": scores.threads, "generation": generation, "samples": samples}


def _texts(samples: Sequence[Sequence[int]], comparison: ModelComparison) -> tuple[str, ...]:
    """Decodes ids as text, up to the end-of-text token."""
    if not samples:
        return ()
    tokenizer = Tokenizer.from_file(str(comparison.dataset.tokenizer / "tokenizer.json"))
    end = comparison.dataset.manifest.details["tokenizer"].get("eos_id")
    whole = (list(ids[: ids.index(end)] if end in ids else ids) for ids in map(list, samples))
    return tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in whole)


def _loss(candidate: ModelCandidate, comparison: ModelComparison, sample: _LossWindows, scores: Scores) -> Figures:
    if candidate.consumer == "transformers":
        return _loss_of_folder(candidate.path, comparison.data)
    return _loss_of_targets(comparison, sample, scores)


def _loss_of_folder(path: Path, data: HeldOutData) -> Figures:
    """Measures the loss as `headrace eval` does, in batches, on a GPU where there is one."""
    found = measure(path, data)
    keys = ("loss_nats", "perplexity", "bits_per_byte", "tokens", "sources", "dtype", "device")
    return {**{key: found[key] for key in keys}, "scoring_tokens_per_second": found["tokens_per_second"]}


def _loss_of_targets(comparison: ModelComparison, sample: _LossWindows, scores: Scores) -> Figures:
    """Loss from a consumer's log-probabilities; none with a document mask, as consumers attend to whole windows."""
    dataset, masked = comparison.dataset, comparison.data.mask_documents
    if masked:
        return {"device": "cpu"}
    counted = targets_of(dataset, sample.chosen, mask_documents=False)
    losses = -np.where(counted, scores.targets.astype(np.float64), 0.0).sum(1)
    targets = count_targets_of_each(dataset, sample.chosen, mask_documents=False)
    loss = float(losses.sum() / targets.sum())
    return {
        "loss_nats": loss,
        "perplexity": perplexity(loss),
        "bits_per_byte": None
        if dataset.masked
        else bits_per_byte(loss, tokens=dataset.tokens, text_bytes=dataset.bytes),
        "tokens": int(targets.sum()),
        "sources": loss_by_source(dataset, sample.chosen, losses, targets),
        "scoring_tokens_per_second": sample.chosen.size * dataset.sequence_length / scores.seconds,
        "device": "cpu",
    }


def _compared(reference: Scores, scores: Scores, sample: _LossWindows) -> Figures:
    found = compare(reference.log_probabilities, scores.log_probabilities, sample.tokens[sample.kept])
    keys = ("mean_kl", "max_kl", "top1_agreement", "positions")
    return {key: getattr(found, key) for key in keys}
