"""Tasks as token ids: the continuations to score, the prompts to continue, and their lengths. No torch.

Context and continuation are encoded together and split where the context alone ends. White space at the end of a
context belongs to the continuation. An empty context is the begin-of-text token, or end-of-text if there is none. Too
long requests lose tokens on the left. lm-evaluation-harness does the same: log-likelihoods can be compared request by
request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foundation.errors import ConfigError, DataError
from pipeline.config.sections.evaluation import TaskSection
from pipeline.data.permutation import derive_key, permute
from pipeline.evaluation.tasks.bundled import bundled_questions
from pipeline.evaluation.tasks.rows import GeneratedQuestion, Question, RankedQuestion, read_questions
from pipeline.models.tokenizer_files import check_tokenizer_folder, load_tokenizer

Ids = npt.NDArray[np.int32]
"""Token ids in 32 bits, to save memory: MMLU after five examples is 56,168 requests of some 700 tokens."""
_TOGETHER = 256
"""Number of texts encoded at a time: a tokenizer's result takes 100 times the memory of the ids."""
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EncodedTask:
    """The requests of a task, question after question.

    Attributes:
        section: config section of the task.
        questions: the sampled questions.
        ids: token ids, int32: context and continuation of each request, or each prompt of a generated task.
        targets: number of tokens of each continuation, int64 [requests]; 0 for a generated task.
        truncated: number of requests that lost tokens of their context.
        tokenizer: tokenizer that decodes continuations.
    """

    section: TaskSection
    questions: tuple[Question, ...]
    ids: tuple[Ids, ...]
    targets: I64
    truncated: int
    tokenizer: Any

    @property
    def name(self) -> str:
        """Name of the task in metrics."""
        return self.section.label

    @property
    def generated(self) -> bool:
        """Whether the task's prompts are continued."""
        return isinstance(self.questions[0], GeneratedQuestion)

    @property
    def lengths(self) -> I64:
        """Positions of each request in a forward pass: prompt with continuation; ranked, all tokens but one."""
        more = self.section.new_tokens if self.generated else -1
        return np.array([len(each) + more for each in self.ids], dtype=np.int64)


def open_tasks(
    sections: Sequence[TaskSection], tokenizer_folder: Path, *, length: int, field: str = "evaluation.tasks"
) -> tuple[EncodedTask, ...]:
    """Reads, draws and encodes the questions of tasks.

    Args:
        sections: the tasks.
        tokenizer_folder: folder of the model's tokenizer.
        length: largest number of positions of a forward pass.
        field: config key or option that names the tasks, for messages.

    Raises:
        ConfigError: a task is unknown, or its continuations do not fit.
        DataError: a file cannot be read or has a bad line, or there is no tokenizer.
    """
    if not sections:
        return ()
    questions = [_drawn(section, _all_questions(section, field)) for section in sections]  # refused before transformers
    check_tokenizer_folder(tokenizer_folder)
    tokenizer = load_tokenizer(tokenizer_folder)
    return tuple(
        _encoded(section, each, tokenizer, length, field) for section, each in zip(sections, questions, strict=True)
    )


def _all_questions(section: TaskSection, field: str) -> Sequence[Question]:
    if section.file is not None:
        return read_questions(Path(section.file))
    assert section.name is not None
    return bundled_questions(section.name, field=f"{field}.name")


def _drawn(section: TaskSection, questions: Sequence[Question]) -> list[Question]:
    """`samples` questions in random order; all questions, in file order, if neither number limits them."""
    if section.samples is None and section.max_tokens is None:
        return list(questions)
    count = min(section.samples or len(questions), len(questions))
    key = derive_key(section.seed, "task samples")
    place = np.argsort(permute(np.arange(len(questions)), size=len(questions), key=key))
    return [questions[number] for number in place[:count].tolist()]


def _encoded(section: TaskSection, questions: list[Question], tokenizer: Any, length: int, field: str) -> EncodedTask:
    if isinstance(questions[0], GeneratedQuestion):
        ids, room = _prompts(questions, tokenizer), length - section.new_tokens
        targets = np.zeros(len(ids), dtype=np.int64)
        if room < 1:
            why = f"a sequence has {length} tokens, and one at least is the prompt's"
            raise ConfigError(
                f"{field}.new_tokens",
                section.new_tokens,
                why=why,
                remedy=f"use at most {length - 1}, or a longer sequence",
            )
    else:
        ids, counts = _requests(questions, tokenizer)
        targets, room = np.array(counts, dtype=np.int64), length + 1
        _check_continuations(section, targets, length)
    cut = [each[-room:] for each in ids]
    kept = _within(section.max_tokens, questions, cut)
    requests = sum(_requests_of(each) for each in questions[:kept])
    truncated = sum(len(each) > room for each in ids[:requests])
    return EncodedTask(
        section, tuple(questions[:kept]), tuple(cut[:requests]), targets[:requests], truncated, tokenizer
    )


def _requests_of(question: Question) -> int:
    return len(question.choices) if isinstance(question, RankedQuestion) else 1


def _within(most: int | None, questions: Sequence[Question], ids: Sequence[Ids]) -> int:
    """Number of first questions that together have at most `most` tokens; at least one, all if `most` is None."""
    if most is None:
        return len(questions)
    ends = np.cumsum([_requests_of(each) for each in questions])
    tokens = np.cumsum([len(each) for each in ids])[ends - 1]
    return max(1, int(np.searchsorted(tokens, most, side="right")))


def _prompts(questions: Sequence[Question], tokenizer: Any) -> list[Ids]:
    return _tokens(tokenizer, [each.prompt for each in questions if isinstance(each, GeneratedQuestion)])


def _requests(questions: Sequence[Question], tokenizer: Any) -> tuple[list[Ids], list[int]]:
    """Ids of each request, and the number of ids in its continuation."""
    pairs = [_split(*each) for one in questions if isinstance(one, RankedQuestion) for each in one.choices]
    contexts = sorted({context for context, _ in pairs if context})  # choices share contexts: encoded once
    begun = dict(zip(contexts, map(len, _tokens(tokenizer, contexts)), strict=True))
    whole = _tokens(tokenizer, [context + continuation for context, continuation in pairs if context])
    alone = [continuation for context, continuation in pairs if not context]
    rest, whole_of = iter(_tokens(tokenizer, alone, add_special_tokens=False)), iter(whole)
    ids, targets = [], []
    for context, _ in pairs:
        if context:
            ids.append(next(whole_of))
            targets.append(len(ids[-1]) - begun[context])
        else:
            ids.append(_after_begin(next(rest), tokenizer))
            targets.append(len(ids[-1]) - 1)
    return ids, targets


def _split(context: str, continuation: str) -> tuple[str, str]:
    """Moves the white space at the end of the context to the continuation; returns both."""
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _tokens(tokenizer: Any, texts: list[str], **how: Any) -> list[Ids]:
    """Ids of each text, with the tokenizer's special tokens, but without a second begin-of-text."""
    if not texts:
        return []
    begin = tokenizer.bos_token
    found: list[Ids] = []
    for first in range(0, len(texts), _TOGETHER):
        part = texts[first : first + _TOGETHER]
        encoded = tokenizer(part, verbose=False, return_attention_mask=False, **how)["input_ids"]
        found += [np.array(each, dtype=np.int32) for each in encoded]
    if begin and "add_special_tokens" not in how:
        for number in [n for n, text in enumerate(texts) if text.startswith(begin)]:
            found[number] = np.array(tokenizer.encode(texts[number], add_special_tokens=False), dtype=np.int32)
    return found


def _after_begin(ids: Ids, tokenizer: Any) -> Ids:
    """A continuation without context, after the begin-of-text token or, if there is none, the end-of-text token."""
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if begin is None:
        why = "a task has an empty context, and the tokenizer has neither a begin-of-text nor an end-of-text token"
        raise DataError(f"{why}\n  try: a context in every line")
    return ids if len(ids) and ids[0] == begin else np.insert(ids, 0, begin)


def _check_continuations(section: TaskSection, targets: I64, length: int) -> None:
    what = f"{section.file or section.name}"
    if int(targets.min()) < 1:
        why = f"{what}: a continuation has no token of its own: the tokenizer joins it with its context"
        raise DataError(f"{why}\n  try: choices that begin with a space")
    if int(targets.max()) > length:
        why = f"a continuation of {what} has {targets.max():,} tokens, and a sequence {length:,}"
        raise ConfigError("data.sequence_length", length, why=why, remedy="use a longer one, or another task")
