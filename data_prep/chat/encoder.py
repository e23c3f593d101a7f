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
import orjson
from tokenizers import Tokenizer

from data_prep.chat.conversation import TEMPLATE_FILE, ConversationError
from data_prep.chat.template import BEGIN, ChatTemplate, Rendered
from data_prep.tokenizer.fingerprint import TOKENIZER_JSON
from data_prep.tokenizer.load import TOKENIZER_CONFIG
from headrace.errors import DataError

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
        special: whether a message may hold a special token that is spelt out; it then becomes the token.
    """

    def __init__(self, folder: Path, *, special: bool) -> None:
        try:
            self._template = ChatTemplate(read_template(folder), _named_tokens(folder))
        except ConversationError as error:
            raise DataError(f"{error}\n  try: mend it, or name another tokenizer.chat_template") from None
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
            ConversationError: a message holds a special token, the template refuses it, or nothing of it is learnt.
        """
        content = orjson.loads(line)
        self._check_texts(content["messages"])
        rendered = self._template.render(content["messages"], tools=content["tools"])
        encoding = self._tokenizer.encode(rendered.text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.uint32)
        mask = np.ones(len(ids), np.uint8) if everything else _mask(encoding.offsets, rendered)
        if not mask.any():
            raise ConversationError("the assistant says nothing")
        return Conversation(rendered.text, ids, mask)

    def _check_texts(self, messages: Sequence[Mapping[str, Any]]) -> None:
        for text in _strings(messages):
            found = next((token for token in (*self._forbidden, BEGIN) if token in text), None)
            if found is not None:
                raise ConversationError(f"a message holds {found!r}, which would become a special token")


@cache
def open_chat_encoder(folder: Path, *, special: bool) -> ChatEncoder:
    """A `ChatEncoder`; kept for the next task of the same process."""
    return ChatEncoder(folder, special=special)


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
        why = "the tokenizer has no chat template, and a source has conversations"
        raise DataError(f'{why}\n  try: "tokenizer": {{"chat_template": "FILE.jinja"}}')
    return template


def _mask(offsets: Sequence[tuple[int, int]], rendered: Rendered) -> npt.NDArray[np.uint8]:
    """A token is learnt when it begins inside a span."""
    begins = np.array([first for first, _ in offsets], np.int64)
    mask = np.zeros(len(begins), np.uint8)
    for first, end in rendered.spans:
        mask[np.searchsorted(begins, first) : np.searchsorted(begins, end)] = 1
    return mask


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / TOKENIZER_CONFIG
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return config


def _named_tokens(folder: Path) -> dict[str, str | None]:
    config = _config(folder)
    named = {name: config.get(name) for name in _NAMED}
    return {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
