"""Questions of a task, and their file: JSON lines, one question each. No torch.

A line of a ranked task has a context, its choices and the number of the right choice, from 0. The scored text is
context + choice, joined unchanged: a choice begins with the space that the text has there.

    {"context": "The mill stands by the", "choices": [" race", " road"], "answer": 0}

`context` may be a list with one context per choice. A single choice has no accuracy, only bits per byte. A line of a
generated task has a prompt and its answers, any of which is right:

    {"prompt": "Q: 2 + 2?\nA:", "answers": ["4", "four"]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.errors import DataError


@dataclass(frozen=True)
class RankedQuestion:
    """A question whose choices are ranked.

    Attributes:
        choices: (context, continuation) of each choice.
        answer: number of the right choice, from 0.
    """

    choices: tuple[tuple[str, str], ...]
    answer: int


@dataclass(frozen=True)
class GeneratedQuestion:
    """A prompt that is continued.

    Attributes:
        prompt: the text.
        answers: right answers, any of which counts.
    """

    prompt: str
    answers: tuple[str, ...]


Question = RankedQuestion | GeneratedQuestion


def read_questions(path: Path) -> list[Question]:
    """Reads the questions of a file, all of one kind.

    Raises:
        DataError: the file cannot be read, has no question, or has an invalid line; the message has its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}\n  try: a file of JSON lines in UTF-8") from None
    found: list[Question] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            question = _question(line)
            if found and type(question) is not type(found[0]):
                raise ValueError("the lines before it are of the other kind: one task has choices or prompts, not both")
        except ValueError as error:
            example = '{"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}'
            raise DataError(f"{path}:{number}: {error}\n  try: a line like {example}") from None
        found.append(question)
    if not found:
        raise DataError(f"{path} has no question\n  try: a JSON object in each line")
    return found


def _question(line: str) -> Question:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    if "prompt" in row:
        _refuse_others(row, {"prompt", "answers"})
        prompt, answers = row["prompt"], row.get("answers", [])
        if not _is_text(prompt) or not _are_texts(answers):
            raise ValueError("prompt is a text, and answers a list of texts, at least one and none empty")
        return GeneratedQuestion(prompt, tuple(answers))
    _refuse_others(row, {"context", "choices", "answer"})
    return _ranked(row.get("context"), row.get("choices"), row.get("answer"))


def _ranked(context: Any, choices: Any, answer: Any) -> RankedQuestion:
    if not _are_texts(choices):
        raise ValueError("choices is a list of texts, at least one and none empty")
    contexts = context if isinstance(context, list) else [context] * len(choices)
    if len(contexts) != len(choices) or not all(isinstance(each, str) for each in contexts):
        raise ValueError(f"context is a text, or a list of {len(choices)}, one for each choice")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"answer is the number of the right choice, 0 to {len(choices) - 1}, and it is {answer!r}")
    return RankedQuestion(tuple(zip(contexts, choices, strict=True)), answer)


def _refuse_others(row: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(row) - known - {"id"}):
        raise ValueError(f"unknown key {unknown[0]!r}; there are {', '.join(sorted(known))} and id")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and bool(values) and all(_is_text(each) for each in values)
