"""Conversations as token ids with a loss mask: 1 where the assistant speaks, 0 elsewhere.

The `tokenizers` library does it, which knows where each token lies in the text; the fast engines do not. The ids are
those of `apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from data_prep.chat.template import MARKS, ChatTemplate, Rendered
from data_prep.sources.conversation import TEMPLATE_FILE, ConversationError, opened
from data_prep.tokenizer.fingerprint import TOKENIZER_JSON
from data_prep.tokenizer.load import TOKENIZER_CONFIG
from headrace.base.errors import DataError

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as it is trained on.

    Attributes:
        text: as the template writes it.
        ids: uint32 [n].
        mask: uint8 [n], 1 for what is learnt.
    """

    text: str
    ids: npt.NDArray[np.uint32]
    mask: npt.NDArray[np.uint8]


class ChatEncoder:
    """Renders and tokenises conversations.

    Args:
        folder: of the tokenizer, with its chat template.
        special: whether a conversation may hold a special token that is spelt out; it then becomes the token.
    """

    def __init__(self, folder: Path, *, special: bool) -> None:
        self._template = compiled(read_template(folder), named_tokens(_config(folder)))
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_JSON))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._forbidden = () if special else tuple(token.content for token in added if token.special)

    def encode(self, line: str, *, everything: bool) -> Conversation:
        """A conversation, from `canonical`.

        Args:
            everything: all of it is learnt, not only what the assistant says.

        Raises:
            ConversationError: a message or a tool holds a special token, the tools are no list, the template refuses
                it, or nothing of it is learnt.
        """
        messages, tools = opened(line)
        check_texts(messages, self._forbidden, where="a message")
        check_texts(tools, self._forbidden, where="a tool")
        rendered = self._template.render(messages, tools=tools)
        encoding = self._tokenizer.encode(rendered.text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.uint32)
        mask = np.ones(len(ids), np.uint8) if everything else _mask(encoding.offsets, rendered)
        if not mask.any():
            raise ConversationError("the assistant says nothing")
        return Conversation(rendered.text, ids, mask)


@cache
def open_chat_encoder(folder: Path, *, special: bool) -> ChatEncoder:
    """A `ChatEncoder`; kept for the next task of the same process."""
    return ChatEncoder(folder, special=special)


def check_texts(value: Any, forbidden: Sequence[str], *, where: str) -> None:
    """Refuses messages or tools that spell out one of the `forbidden` tokens, or a sign of the template's own.

    Raises:
        ConversationError: a string in them, or a key, does.
    """
    for text in _strings(value):
        if found := next((token for token in forbidden if token in text), None):
            raise ConversationError(f"{where} holds {found!r}, which would become a special token")
        if found := next((mark for mark in MARKS if mark in text), None):
            raise ConversationError(f"{where} holds {found!a}, which marks what the assistant says")


def compiled(source: str, tokens: Mapping[str, str | None]) -> ChatTemplate:
    """A chat template that is ready to render; `tokens` as in `ChatTemplate`.

    Raises:
        DataError: it does not compile.
    """
    try:
        return ChatTemplate(source, tokens)
    except ConversationError as error:
        raise DataError(f"{error}\n  try: mend it, or name another tokenizer.chat_template") from None


def read_template(folder: Path) -> str:
    """The chat template of a tokenizer folder.

    Raises:
        DataError: it has none.
    """
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _config(folder).get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        raise no_template()
    return template


def no_template() -> DataError:
    """There are conversations, and nothing says how they become text."""
    why = "the tokenizer has no chat template, and a source has conversations"
    return DataError(f'{why}\n  try: "tokenizer": {{"chat_template": "FILE.jinja"}}')


def named_tokens(config: Mapping[str, Any]) -> dict[str, str | None]:
    """What a template may name, of a tokenizer with this tokenizer_config.json."""
    named = {name: config.get(name) for name in _NAMED}
    return {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}


def _mask(offsets: Sequence[tuple[int, int]], rendered: Rendered) -> npt.NDArray[np.uint8]:
    """A token is learnt when it begins inside a span."""
    begins = np.array([first for first, _ in offsets], np.int64)
    mask = np.zeros(len(begins), np.uint8)
    for first, end in rendered.spans:
        mask[np.searchsorted(begins, first) : np.searchsorted(begins, end)] = 1
    return mask


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / TOKENIZER_CONFIG
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return config
