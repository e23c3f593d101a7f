"""Rewrites values of messages that have a form of OpenAI's API that a chat template cannot print.

A message may have no content (null) or a list of parts, and the arguments of a tool call may be a string of JSON or an
object. Templates take some of these forms and print others as Python's own text (`None`, `[{'type': ...}]`) or as JSON
escaped twice. So a conversation is rendered as written, and only forms that the template misprints or rejects
are changed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.sources.conversation import ConversationError, joined_parts
from foundation.foreign_json import json_row

Messages = Sequence[Mapping[str, Any]]

NEEDED = frozenset({"content", "tool_calls", "function_call"})
"""Fields that a rendering must show: a conversation that loses one is not trained on."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the field with an answer's reasoning; transformers copies the first of them that is given to all of them
(5.23, `_alias_reasoning_fields`)."""
_OTHER = "\U0010fff3"
_NEVER_PRINTED = frozenset({"role", "weight", "train", "loss_mask"})


@dataclass(frozen=True, slots=True)
class _Form:
    """A form of a value.

    Attributes:
        change: function that returns the messages with another form in its place; equal messages if none has the form.
        misprints: function that returns texts that occur more often in a rendering if the template cannot print the
            form.
    """

    change: Callable[[Messages], list[Any]]
    misprints: Callable[[Messages], list[str]]


def fit(messages: Messages, render: Callable[[Messages], str]) -> Messages:
    """Changes the form of values that the template cannot print.

    Args:
        messages: messages of a conversation, unchanged.
        render: function that returns the text of messages; raises ConversationError.

    Raises:
        ConversationError: a part of a message is not text.
    """
    for form in _FORMS:
        changed = form.change(messages)
        if changed == list(messages):
            continue
        before, after = _text(render, messages), _text(render, changed)
        if after is None:
            continue
        if before is None or any(before.count(text) > after.count(text) for text in form.misprints(messages)):
            messages = changed
    return messages


def with_reasoning(messages: Messages) -> Messages:
    """Adds reasoning under all names that templates read, like transformers."""
    found: list[Any] = []
    for message in messages:
        given = {key: value for key, value in message.items() if key not in _REASONING or value is not None}
        said = next((given[key] for key in _REASONING if key in given), None)
        found.append(given if said is None else {"thinking": said, **given, "reasoning_content": said})
    return found


def lost_reasoning(messages: Messages, text: str) -> int:
    """Counts messages with reasoning in their content (before `</think>`) that the text lacks."""
    parts = (m["content"].rpartition("</think>")[0] for m in messages if isinstance(m.get("content"), str))
    return sum(part.replace("<think>", "").strip() not in text for part in parts)


def doubtful_fields(messages: Messages, text: str) -> Iterator[tuple[str, list[int]]]:
    """Yields fields that may have left no trace in a rendering: their name, and the numbers of messages with them.

    Contents and reasoning are yielded one by one, unless their words are in the text. Any other non-empty field is
    yielded for all messages at once. The three names of reasoning are one field, `reasoning`. A content's name includes
    the role, if the message has tool calls or is neither the user's nor the assistant's.
    """
    others: dict[str, list[int]] = defaultdict(list)
    for i, message in enumerate(messages):
        role, said = message.get("role"), ("content", message.get("content"))
        bare = role in ("user", "assistant") and not (message.get("tool_calls") or message.get("function_call"))
        for name, value in (said, ("reasoning", message.get("reasoning_content"))):
            if value and not (isinstance(value, str) and value.strip() in text):
                yield name if bare or name != "content" else f"content of {role}", [i]
        for name in message.keys() - _NEVER_PRINTED - {"content", *_REASONING}:
            if message[name]:
                others[name].append(i)
    yield from sorted(others.items())


def without(messages: Messages, name: str, which: Sequence[int]) -> list[Any]:
    """Removes a field named by `doubtful_fields` from some messages; replaces a content by another."""
    gone = _REASONING if name == "reasoning" else (name,)
    other = {"content": _OTHER} if name.startswith("content") else {}
    return [
        {key: value for key, value in m.items() if key not in gone} | other if i in which else m
        for i, m in enumerate(messages)
    ]


def _text(render: Callable[[Messages], str], messages: Messages) -> str | None:
    try:
        return render(messages)
    except ConversationError:  # fit's caller renders the result, and gets the error then
        return None


def _with_text(messages: Messages) -> list[Any]:
    return [{**m, "content": ""} if "content" in m and m["content"] is None else m for m in messages]


def _without_nulls(messages: Messages) -> list[Any]:
    return [{key: value for key, value in m.items() if key == "content" or value is not None} for m in messages]


def _with_joined_parts(messages: Messages) -> list[Any]:
    return [{**m, "content": joined_parts(m["content"])} if isinstance(m.get("content"), list) else m for m in messages]


def _with_objects(messages: Messages) -> list[Any]:
    return _with_arguments(messages, _as_object)


def _with_strings(messages: Messages) -> list[Any]:
    return _with_arguments(messages, lambda value: _json(value) if isinstance(value, dict) else value)


def _as_object(value: Any) -> Any:
    """Parses a string that holds a JSON object; returns other values unchanged."""
    parsed = json_row(value) if isinstance(value, str) else None
    return value if parsed is None else parsed


def _with_arguments(messages: Messages, change: Callable[[Any], Any]) -> list[Any]:
    """Changes the arguments of all tool calls."""

    def changed(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call

    found: list[Any] = []
    for message in messages:
        new = dict(message)
        if isinstance(message.get("tool_calls"), list):
            new["tool_calls"] = [changed(call) for call in message["tool_calls"]]
        if "function_call" in message:
            new["function_call"] = changed(message["function_call"])
        found.append(new)
    return found


def _arguments(messages: Messages) -> Iterator[Any]:
    found: list[Any] = []
    _with_arguments(messages, found.append)
    yield from found


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_FORMS = (
    _Form(
        _with_joined_parts, lambda messages: [str(m["content"]) for m in messages if isinstance(m.get("content"), list)]
    ),
    _Form(_with_text, lambda _: ["None"]),
    _Form(_without_nulls, lambda _: ["None"]),
    _Form(_with_objects, lambda messages: [_json(value) for value in _arguments(messages) if isinstance(value, str)]),
    _Form(_with_strings, lambda messages: [str(value) for value in _arguments(messages) if isinstance(value, dict)]),
)
