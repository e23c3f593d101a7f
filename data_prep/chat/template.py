"""Chat templates: renders a conversation as text and finds the spans that the assistant generates (for the loss mask).

Chat templates are Jinja templates, run as Hugging Face's `apply_chat_template` does: sandboxed, with `trim_blocks` and
`lstrip_blocks`, loop controls, `raise_exception`, a `tojson` that keeps non-ASCII characters, and `{% generation %}`
blocks around the assistant's output. `strftime_now` is refused. A template without such blocks is rendered turn by
turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class _Generation(Extension):
    """The block `{% generation %} ... {% endgeneration %}`. found: whether the template has one."""

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
        tokens: variables of the template: `bos_token`, `eos_token` and the like; one that is None is undefined.

    Raises:
        ConversationError: the template does not compile.
    """

    def __init__(self, source: str, tokens: Mapping[str, str | None]) -> None:
        self._tokens = {name: token for name, token in tokens.items() if token is not None}
        self._source = source
        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # a `break` outside a loop raises Python's SyntaxError
            raise ConversationError(f"the chat template does not compile: {_message(error)}") from None
        generation = environment.extensions[_Generation.identifier]
        assert isinstance(generation, _Generation)
        self._has_generation_blocks = generation.found

    def fit(self, messages: forms.Messages, *, tools: Sequence[Any] | None = None) -> forms.Messages:
        """The messages as the template can print them, see `forms`.

        Raises:
            ConversationError: a part of a message is not text, or the template does not print a message's tool calls.
        """
        fitting = forms.fit(messages, lambda changed: self._render(changed, tools))
        if "tool_calls" not in self._source and any(message.get("tool_calls") for message in fitting):
            without = [{key: m[key] for key in m if key != "tool_calls"} for m in fitting]
            if self._render(fitting, tools) == self._render(without, tools):
                raise ConversationError("a message has tool_calls, which the chat template does not print")
        return fitting

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None) -> Rendered:
        """Renders a conversation.

        Args:
            messages: {"role", "content", ...} of each turn.
            tools: tool descriptions that the template may list.

        Raises:
            ConversationError: the template raises an error, or the assistant's spans cannot be determined.
        """
        if self._has_generation_blocks:
            return _extract_spans(self._render(messages, tools))
        return self._turn_by_turn(messages, tools)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, prompt: bool = False
    ) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._tokens
            )
        except Exception as error:  # a template's expressions can raise any type
            raise ConversationError(_message(error)) from None

    def _turn_by_turn(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> Rendered:
        """An assistant turn's span: what it adds to the text before it, generation prompt included there."""
        whole = self._render(messages, tools)
        if _MARKER.search(whole):
            raise ConversationError(
                "the text contains a marker of assistant output, and the template has no generation blocks"
            )
        spans = []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            after = self._render(messages[: i + 1], tools)
            before = self._render(messages[:i], tools, prompt=True) if i else self._before_first(after, tools)
            if not whole.startswith(after) or not after.startswith(before):
                why = "the chat template renders earlier turns differently when later ones follow"
                raise ConversationError(f"{why}: it needs {{% generation %}} blocks")
            spans.append((len(before), len(after)))
        return Rendered(whole, tuple(spans))

    def _before_first(self, after: str, tools: Sequence[Any] | None) -> str:
        """What a template writes before an assistant's message that begins a conversation, such as a system prompt.

        Many templates fail without any message. So it is the beginning that the rendering shares with two others, of
        contents that have no character in common.
        """
        others = (self._render([{"role": "assistant", "content": sign}], tools) for sign in _SIGNS)
        return commonprefix([after, *others])  # noqa: RUF071 - of characters, not of a path


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
    if isinstance(error, TemplateError) and message:  # often written by the template's author
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _no_clock
    return environment


def _tojson(value: Any, *, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _no_clock(_format: str) -> str:
    raise TemplateError("the template asks for today's date (strftime_now): the output would not be reproducible")
