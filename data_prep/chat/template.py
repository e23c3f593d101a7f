"""Conversations as text, by a tokenizer's chat template, with the parts of the assistant marked.

Chat templates are Jinja templates as Hugging Face's `apply_chat_template` runs them: sandboxed, with `trim_blocks` and
`lstrip_blocks`, loop controls, `raise_exception`, a `tojson` that keeps non-ASCII, and `{% generation %}` blocks around
what the assistant says. `strftime_now` is refused. A template without such blocks is rendered turn by turn instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data_prep.sources.conversation import ConversationError

MARKS = BEGIN, END = "\U0010fff1", "\U0010fff2"
"""Stand around the assistant's parts while a template is rendered: private characters that a message must not hold. One
character each, so that none can come of what two messages hold.
"""
_SIGN = re.compile(f"([{BEGIN}{END}])")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text. spans: (first character, end) of each part that the assistant says."""

    text: str
    spans: tuple[tuple[int, int], ...]


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`. found: whether the template has any."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it
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
        tokens: what it may name: `bos_token`, `eos_token` and the like.

    Raises:
        ConversationError: it does not compile.
    """

    def __init__(self, source: str, tokens: Mapping[str, str | None]) -> None:
        self._tokens = {name: token or "" for name, token in tokens.items()}
        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # a `break` outside a loop is Python's SyntaxError
            raise ConversationError(f"the chat template does not compile: {_words(error)}") from None
        generation = environment.extensions[_Generation.identifier]
        assert isinstance(generation, _Generation)
        self._marks = generation.found

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None) -> Rendered:
        """The text of a conversation.

        Args:
            messages: {"role", "content", ...} of each turn.
            tools: what the template may list.

        Raises:
            ConversationError: the template refuses it, or it cannot be seen where the assistant speaks.
        """
        if self._marks:
            return _unmarked(self._render(messages, tools))
        return self._turn_by_turn(messages, tools)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, prompt: bool = False
    ) -> str:
        try:
            return self._template.render(messages=messages, tools=tools, add_generation_prompt=prompt, **self._tokens)
        except Exception as error:  # whatever a template's expressions raise
            raise ConversationError(_words(error)) from None

    def _turn_by_turn(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> Rendered:
        """What a turn of the assistant adds to the text before it, with the prompt that asks for it."""
        whole = self._render(messages, tools)
        if _SIGN.search(whole):
            raise ConversationError("the text holds a sign for what the assistant says, and the template sets none")
        spans = []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(messages[:i], tools, prompt=True) if i else ""
            after = self._render(messages[: i + 1], tools)
            if not whole.startswith(after) or not after.startswith(before):
                why = "the chat template writes earlier turns otherwise when later ones follow"
                raise ConversationError(f"{why}: it needs {{% generation %}} blocks")
            spans.append((len(before), len(after)))
        return Rendered(whole, tuple(spans))


def _unmarked(text: str) -> Rendered:
    """Takes the signs out, and returns where they were.

    Raises:
        ConversationError: they do not come in pairs.
    """
    pieces = _SIGN.split(text)  # text and sign by turns
    texts, signs = pieces[::2], pieces[1::2]
    if signs != [BEGIN, END] * (len(signs) // 2):
        raise ConversationError("a {% generation %} block of the chat template holds another, or is left half-way")
    places = list(accumulate(map(len, texts)))[:-1]
    return Rendered("".join(texts), tuple(zip(places[::2], places[1::2], strict=True)))


def _words(error: Exception) -> str:
    said = str(error)
    if isinstance(error, TemplateError) and said:  # often the template's own words
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _no_clock
    return environment


def _tojson(value: Any, *, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _no_clock(_format: str) -> str:
    raise TemplateError("the template asks for today's date: the same input would give other bytes tomorrow")
