"""Encodes conversations as token ids with a loss mask: 1 for tokens that the assistant generates, 0 elsewhere.

It uses the reference of the tokenizer (`load.reference_of`), which returns each token's offset in the text; the fast
engines do not. The ids are those of `apply_chat_template`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.chat.template import MARKERS, ChatTemplate, Rendered
from data_prep.sources.conversation import TEMPLATE_FILE, ConversationError, parse_conversation
from data_prep.tokenizer.load import load, read_config, reference_of, token_text
from headrace.base.errors import DataError

Offsets = Sequence[tuple[int, int]]

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """A conversation as training data.

    Attributes:
        text: rendered by the chat template.
        ids: uint32 [n], token ids.
        mask: uint8 [n], loss mask: 1 for tokens that count in the loss.
        end_learnt: whether the EOS that is put after it counts in the loss.
    """

    text: str
    ids: npt.NDArray[np.uint32]
    mask: npt.NDArray[np.uint8]
    end_learnt: bool = False

    def without(self, before: Sequence[int], after: Sequence[int]) -> EncodedConversation:
        """Without the BOS and the EOS that the template has written, where the same are put around every document.

        Otherwise a document would begin with two and end with two, which no other text has.

        Args:
            before, after: the ids that are put around a document; at most one each.
        """
        first, last = int(self.ids[:1].tolist() == list(before)), len(self.ids)
        ends = self.ids[-1:].tolist() == list(after)
        kept = slice(first, last - 1 if ends else last)
        return replace(self, ids=self.ids[kept], mask=self.mask[kept], end_learnt=bool(ends and self.mask[-1]))


class ChatEncoder:
    """Renders and tokenizes conversations.

    Args:
        folder: of the tokenizer, which has a chat template.
        parse_special_tokens: whether a message may contain a literal special token, which then becomes that token.
    """

    def __init__(self, folder: Path, *, parse_special_tokens: bool) -> None:
        self._template = compile_template(read_template(folder), template_tokens(read_config(folder)))
        tokenizer = load(folder, parse_special_tokens=True)
        self._encode = _encoder(folder, tokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        self._forbidden = () if parse_special_tokens else tuple(token.content for token in added if token.special)

    def encode(self, line: str, *, everything: bool) -> EncodedConversation:
        """Encodes a conversation.

        Args:
            line: JSON, from `conversation_line`.
            everything: sets the loss mask to 1 for all tokens, not only the assistant's.

        Raises:
            ConversationError: a message or a tool contains a special token, the tools are not a list, the template
                raises an error, or the loss mask is all zeros.
        """
        messages, tools = parse_conversation(line)
        check_no_special_tokens(messages, self._forbidden, where="a message")
        check_no_special_tokens(tools, self._forbidden, where="a tool")
        rendered = self._template.render(messages, tools=tools)
        ids, offsets = self._encode(rendered.text)
        mask = np.ones(len(ids), np.uint8) if everything else _assistant_mask(offsets, rendered)
        if not mask.any():
            raise ConversationError("the assistant says nothing: no token would count in the loss")
        return EncodedConversation(rendered.text, ids, mask)


@cache
def open_chat_encoder(folder: Path, *, parse_special_tokens: bool) -> ChatEncoder:
    """Opens a `ChatEncoder`; cached for the process's next tasks."""
    return ChatEncoder(folder, parse_special_tokens=parse_special_tokens)


def check_no_special_tokens(value: Any, forbidden: Sequence[str], *, where: str) -> None:
    """Refuses messages or tools that contain a literal special token, or a marker of `template.MARKERS`.

    Args:
        value: JSON value; its strings and keys are searched.
        forbidden: texts of the special tokens.
        where: subject of the error message, e.g. "a message".

    Raises:
        ConversationError: one of them occurs.
    """
    for text in _strings(value):
        if found := next((token for token in forbidden if token in text), None):
            raise ConversationError(f"{where} contains {found!r}, which would become a special token")
        if found := next((marker for marker in MARKERS if marker in text), None):
            raise ConversationError(f"{where} contains {found!a}, which is reserved as a marker of assistant output")


def compile_template(source: str, tokens: Mapping[str, str | None]) -> ChatTemplate:
    """Compiles a chat template; `tokens` as in `ChatTemplate`.

    Raises:
        DataError: the template does not compile.
    """
    try:
        return ChatTemplate(source, tokens)
    except ConversationError as error:
        raise DataError(
            f"{error}\n  try: correct the template, or set tokenizer.chat_template to another file"
        ) from None


def read_template(folder: Path) -> str:
    """The chat template of a tokenizer folder.

    Raises:
        DataError: the folder has none.
    """
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_config(folder).get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        raise missing_template_error()
    return template


def missing_template_error() -> DataError:
    """The error for conversations without a chat template."""
    why = "a source has conversations, and the tokenizer has no chat template"
    return DataError(f'{why}\n  try: set "tokenizer": {{"chat_template": "FILE.jinja"}}')


def template_tokens(config: Mapping[str, Any]) -> dict[str, str | None]:
    """The special tokens that a chat template may use, from the contents of tokenizer_config.json."""
    named = {name: config.get(name) for name in _NAMED}
    return {name: token_text(token) for name, token in named.items()}


def _encoder(folder: Path, tokenizer: Any) -> Callable[[str], tuple[npt.NDArray[np.uint32], Offsets]]:
    """A function that gives the ids of a text and the characters that each stands for."""
    if reference_of(folder) == "sentencepiece":
        from data_prep.tokenizer.sentencepiece_engine import SentencepieceEngine  # noqa: PLC0415 - few jobs need it

        return SentencepieceEngine(folder, parse_special_tokens=True).encode_with_offsets

    def encode(text: str) -> tuple[npt.NDArray[np.uint32], Offsets]:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.uint32), encoding.offsets

    return encode


def _assistant_mask(offsets: Offsets, rendered: Rendered) -> npt.NDArray[np.uint8]:
    """The loss mask: 1 for tokens that share a character with a span of the assistant.

    A token that begins before the span, such as a blank of the template with the answer's first word, is learnt, as in
    the mask of transformers: the answer's first word has no other token.
    """
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), np.uint8)
    for first, end in rendered.spans:
        mask[(starts < end) & ((ends > first) | (starts >= first))] = 1  # some tokens have no characters
    return mask


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
