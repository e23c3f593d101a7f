"""Chat templates: renders a conversation as text and finds the spans that the assistant generates (for the loss mask).

Chat templates are Jinja templates, run as by Hugging Face's `apply_chat_template`: sandboxed, with `trim_blocks` and
`lstrip_blocks`, loop controls, `raise_exception`, a `tojson` that keeps non-ASCII characters, and `{% generation %}`
blocks around the assistant's output. `strftime_now` gives the date that the config names; without a date it is refused.
A template without generation blocks is rendered turn by turn.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import accumulate
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data_prep.chat import forms
from data_prep.sources.conversation import ConversationError

MARKERS = BEGIN, END = "\U0010fff1", "\U0010fff2"
"""Markers around the assistant's spans during rendering: private-use characters that a message must not contain. Each
is a single character, so that concatenated messages cannot form one.
"""
_SIGNS = "\U0010fff3", "\U0010fff4"
_MARKER = re.compile(f"([{BEGIN}{END}])")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation.

    Attributes:
        text: the output of the template.
        spans: (start, end) in characters, end exclusive, of each part that the assistant generates.
        unprinted: field that leaves no trace in the text -> number of messages that have it.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    unprinted: Mapping[str, int] = field(default_factory=dict)


class _GenerationBlock(Extension):
    """The block `{% generation %} ... {% endgeneration %}`; `found`: whether the template has one."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so
    found = False

    def parse(self, parser: Parser) -> nodes.Node:
        self.found = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marked = [_constant(BEGIN, line), *body, _constant(END, line)]
        return nodes.Scope(marked, lineno=line)


def _constant(text: str, line: int) -> nodes.Node:
    return nodes.Output([nodes.TemplateData(text, lineno=line)], lineno=line)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the template.
        tokens: variables of the template, such as `bos_token` and `eos_token`; a variable that is None is undefined.
        special: texts of the tokenizer's special tokens.
        date: date that `strftime_now` formats, e.g. "2026-01-31"; None refuses templates that need it.

    Raises:
        ConversationError: the template does not compile.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str | None], *, special: Sequence[str] = (), date: str | None = None
    ) -> None:
        self._tokens = {name: token for name, token in tokens.items() if token is not None}
        self._special = special
        self._closing = re.compile("|".join([r"\s", *map(re.escape, sorted(special, key=len, reverse=True))]))
        environment = _environment(date)
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # a `break` outside a loop raises Python's SyntaxError
            raise ConversationError(f"the chat template does not compile: {_message(error)}") from None
        generation = environment.extensions[_GenerationBlock.identifier]
        assert isinstance(generation, _GenerationBlock)
        self._has_generation_blocks = generation.found

    def fit(self, messages: forms.Messages, *, tools: Sequence[Any] | None = None) -> forms.Messages:
        """Changes the messages to forms that the template can print (see `forms`).

        Raises:
            ConversationError: a part of a message is not text.
        """
        return forms.fit(forms.with_reasoning(messages), lambda changed: self._render(changed, tools))

    def render(self, messages: forms.Messages, *, tools: Sequence[Any] | None = None) -> Rendered:
        """Renders a conversation.

        Args:
            messages: {"role", "content", ...} of each turn, from `fit`.
            tools: tool descriptions that the template may list.

        Raises:
            ConversationError: the template raises an error or does not print a message's tool calls, or the assistant's
                spans cannot be determined.
        """
        blocks = self._has_generation_blocks
        found = _extract_spans(self._render(messages, tools)) if blocks else self._turn_by_turn(messages, tools)
        unprinted = self._unprinted(messages, tools, found.text)
        if needed := unprinted.keys() & forms.NEEDED:
            raise ConversationError(f"a message has {min(needed)}, which the chat template does not print")
        return replace(found, unprinted=unprinted)

    def _render(self, messages: forms.Messages, tools: Sequence[Any] | None, *, prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._tokens
            )
        except Exception as error:  # a template's expressions can raise any type
            raise ConversationError(_message(error)) from None

    def _unprinted(self, messages: forms.Messages, tools: Sequence[Any] | None, text: str) -> Counter[str]:
        """Counts messages, by field, that render to the same text without the field."""

        def is_text(messages: forms.Messages, tools: Sequence[Any] | None) -> bool:
            try:
                return _MARKER.sub("", self._render(messages, tools)) == text
            except ConversationError:  # the template requires the field
                return False

        found = Counter(reasoning=forms.lost_reasoning(messages, text), tools=bool(tools) and is_text(messages, None))
        for name, which in forms.doubtful_fields(messages, text):
            if is_text(forms.without(messages, name, which), tools):
                found[name] += len(which)
        return +found

    def _turn_by_turn(self, messages: forms.Messages, tools: Sequence[Any] | None) -> Rendered:
        """Renders turn by turn: an assistant's span is the text that its turn adds after a generation prompt."""
        whole = self._render(messages, tools)
        if _MARKER.search(whole):
            raise ConversationError(
                "the text contains a marker of assistant output, and the template has no generation blocks"
            )
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        return Rendered(whole, tuple(self._span(whole, messages, i, tools) for i in turns))

    def _span(self, whole: str, messages: forms.Messages, i: int, tools: Sequence[Any] | None) -> tuple[int, int]:
        """The span of message `i` in the text of the whole conversation.

        Templates write two things at the end of a text that a turn within it lacks: a generation prompt with more than
        the turn's beginning (`<think>`), and other special tokens at its end (a closing EOS). There the span ends where
        the two texts differ.

        Raises:
            ConversationError: the turn, or one before it, is rendered differently in the whole conversation.
        """
        after = self._render(messages[: i + 1], tools)
        before = self._render(messages[:i], tools, prompt=True) if i else self._before_first(after, tools)
        if whole.startswith(after) and after.startswith(before):
            return len(before), len(after)
        start, end = len(before), self._shared(after, whole)
        earliest = self._shared(before, self._render(messages[:i], tools)) if i else 0
        if not after.startswith(before):  # the turn may begin like the rest of the prompt
            signed = self._render([*messages[:i], {**messages[i], "content": _SIGNS[0]}], tools)
            start = self._shared(after, before, signed)
        if start < earliest or self._closing.sub("", after[end:]):
            why = "the chat template changes earlier turns when a later one is added, so that no mask can be derived"
            raise ConversationError(f"{why}: it needs {{% generation %}} blocks")
        return start, end

    def _shared(self, text: str, *others: str) -> int:
        """Number of leading characters that a text shares with others, without a part of a special token.

        Special tokens often have the same first characters (`<|`).
        """
        shared = len(commonprefix([text, *others]))  # noqa: RUF071 - of characters, not of a path
        windows = ((token, max(0, shared - len(token) + 1), shared + len(token) - 1) for token in self._special)
        return min((at for token, *window in windows if (at := text.find(token, *window)) >= 0), default=shared)

    def _before_first(self, after: str, tools: Sequence[Any] | None) -> str:
        """The text that a template writes before an assistant's opening message, such as a system prompt.

        Many templates fail without any message. So the text is found as the common beginning of the rendering and two
        others, whose contents have no character in common.
        """
        others = (self._render([{"role": "assistant", "content": sign}], tools) for sign in _SIGNS)
        return after[: self._shared(after, *others)]


def _extract_spans(text: str) -> Rendered:
    """Removes the markers and returns their positions as spans.

    Raises:
        ConversationError: the markers are not in pairs.
    """
    pieces = _MARKER.split(text)  # texts and markers alternate
    texts, markers = pieces[::2], pieces[1::2]
    if markers != [BEGIN, END] * (len(markers) // 2):
        raise ConversationError("a {% generation %} block of the chat template contains another, or does not end")
    positions = list(accumulate(map(len, texts)))[:-1]
    return Rendered("".join(texts), tuple(zip(positions[::2], positions[1::2], strict=True)))


def _message(error: Exception) -> str:
    message = str(error)
    if isinstance(error, TemplateError) and message:  # the template's author often wrote it
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _environment(date: str | None) -> ImmutableSandboxedEnvironment:
    extensions = [_GenerationBlock, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _no_clock if date is None else datetime.fromisoformat(date).strftime
    return environment


def _tojson(value: Any, *, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _no_clock(_format: str) -> str:
    why = "the chat template prints today's date (strftime_now), and the output would be another tomorrow"
    raise TemplateError(f'{why}: set the date in the config, e.g. "tokenizer": {{"date": "2026-01-31"}}')
