"""Figures of a task: accuracy, accuracy normalized by length, bits per byte, exact match. No torch.

- accuracy: share of questions whose right choice has the highest log-likelihood (lm-evaluation-harness: acc);
- accuracy_per_character: the same with log-likelihood / characters of the choice, without one leading space (acc_norm);
- accuracy_per_token: the same with log-likelihood / tokens of the choice;
- bits_per_byte: -log2 p(right choice | context) / UTF-8 bytes of the choice, mean over questions; it is also defined
  for a single reference answer, and falls steadily where accuracies are still at chance;
- exact_match: share of prompts whose continuation is right by the task's rule.

Shares have their 95 % interval by Wilson 1927 ("Probable inference, the law of succession, and statistical inference"),
which holds near 0 and 1 and in small samples; means have +- 1.96 standard errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pipeline.evaluation.tasks.encode import EncodedTask
from pipeline.evaluation.tasks.rows import GeneratedQuestion, RankedQuestion

F64 = npt.NDArray[np.float64]
Z95: Final = 1.959963984540054
"""Quantile of the normal distribution for a two-sided 95 % interval."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def ranked_figures(task: EncodedTask, nats: F64) -> dict[str, float]:
    """Figures of a ranked task.

    Args:
        task: the requests.
        nats: [requests], -log p(continuation | context).
    """
    right: dict[str, list[bool]] = {"accuracy": [], "accuracy_per_character": [], "accuracy_per_token": []}
    bits, done = [], 0
    for question in task.questions:
        assert isinstance(question, RankedQuestion)
        own = slice(done, done + len(question.choices))
        done = own.stop
        texts = [text for _, text in question.choices]
        bits.append(nats[own][question.answer] / math.log(2) / len(texts[question.answer].encode()))
        if len(texts) > 1:
            characters = np.array([len(text.removeprefix(" ")) or 1 for text in texts])
            sizes = (np.ones_like(characters), characters, task.targets[own])
            for name, size in zip(right, sizes, strict=True):
                right[name].append(int(np.argmin(nats[own] / size)) == question.answer)
    found = {name: value for name, each in right.items() if each for name, value in _share(name, each).items()}
    return {**found, **_mean("bits_per_byte", bits), **_counts(task)}


def generated_figures(task: EncodedTask, tokens: npt.NDArray[np.int64]) -> dict[str, float]:
    """Figures of a generated task.

    Args:
        task: the prompts.
        tokens: continuations of the prompts, int64 [prompts, new tokens]; tokens after an end are ignored.
    """
    rule = MATCHES[task.section.match]
    right = [
        any(rule(text, answer) for answer in question.answers)
        for question, text in zip(task.questions, continuations(task, tokens), strict=True)
        if isinstance(question, GeneratedQuestion)
    ]
    return {**_share("exact_match", right), **_counts(task)}


def continuations(task: EncodedTask, tokens: npt.NDArray[np.int64]) -> list[str]:
    """The texts of continuations, up to the end-of-text token or the first of the task's stop texts."""
    end, texts = task.tokenizer.eos_token_id, []
    for row in tokens.tolist():
        ids = row[: row.index(end)] if end in row else row
        text: str = task.tokenizer.decode(ids)
        places = [text.find(stop) for stop in task.section.stop if stop]
        texts.append(text[: min([place for place in places if place >= 0], default=len(text))])
    return texts


def _is_number(text: str, answer: str) -> bool:
    found = _NUMBER.findall(text)
    try:
        return bool(found) and float(found[-1].replace(",", "")) == float(answer.strip().replace(",", ""))
    except ValueError:
        return False


def _gsm8k(pattern: re.Pattern[str], which: int) -> Callable[[str, str], bool]:
    """Makes a filter of lm-evaluation-harness's task gsm8k (version 3) and its exact_match."""

    def rule(text: str, answer: str) -> bool:
        found = [match[0].strip() for match in pattern.finditer(text)]
        return _gsm8k_text(found[which] if found else "[invalid]") == _gsm8k_text(answer)

    return rule


def _gsm8k_text(text: str) -> str:
    return re.sub(r"\.$", "", re.sub(r"(?s).*#### ", "", re.sub(r"[,$]", "", text))).lower()


MATCHES: Final[dict[str, Callable[[str, str], bool]]] = {
    "exact": lambda text, answer: text.strip() == answer.strip(),
    "contains": lambda text, answer: answer.strip() in text,
    "number": _is_number,
    "gsm8k_strict": _gsm8k(re.compile(r"(?<=#### )-?[0-9.,]+"), 0),
    "gsm8k_flexible": _gsm8k(re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+"), -1),
}
"""Rule -> function that tells whether a continuation matches an answer."""


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """95 % interval of a share."""
    share, z2 = successes / trials, Z95**2 / trials
    centre, half = share + z2 / 2, Z95 * math.sqrt((share * (1 - share) + z2 / 4) / trials)
    low, high = (centre - half) / (1 + z2), (centre + half) / (1 + z2)
    return low if successes else 0.0, high if successes < trials else 1.0  # exact at 0 and 1, without rounding


def _share(name: str, right: Sequence[bool]) -> dict[str, float]:
    low, high = wilson(sum(right), len(right))
    return {name: sum(right) / len(right), f"{name}_low": low, f"{name}_high": high}


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    mean = float(np.mean(values))
    if len(values) < 2:
        return {name: mean}
    half = Z95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}


def _counts(task: EncodedTask) -> dict[str, float]:
    return {"samples": len(task.questions), "requests": len(task.ids), "truncated": task.truncated}
