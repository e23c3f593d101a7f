"""Encodes conversations as token ids with a loss mask: 1 for tokens that the assistant generates, 0 elsewhere.

It uses the tokenizer's reference library (`load.reference_of`), which returns each token's offset in the text, unlike
the fast engines. The ids are those of `apply_chat_template`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.chat.forms import Messages
from data_prep.chat.template import MARKERS, ChatTemplate, Rendered
from data_prep.sources.conversation import TEMPLATE_FILE, ConversationError, conversation_line, parse_conversation
from data_prep.tokenizer.load import load, read_config, reference_of, token_text
from foundation.errors import DataError

Offsets = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """A conversation as training data.

    Attributes:
        text: text rendered by the chat template.
        ids: uint32 [n], token ids.
        mask: uint8 [n], loss mask: 1 for tokens that count in the loss.
        end_learnt: whether an EOS appended to the conversation counts in the loss: it replaces an EOS that does, or no
            other token ends the assistant's last turn.
        blanks: number of blank tokens at the end, such as the line end behind `<|im_end|>`.
        unprinted: field that leaves no trace in the text -> number of messages that have it.
    """

    text: str
    ids: npt.NDArray[np.uint32]
    mask: npt.NDArray[np.uint8]
    end_learnt: bool = False
    blanks: int = 0
    unprinted: Mapping[str, int] = field(default_factory=dict)

    def without(self, before: Sequence[int], after: Sequence[int]) -> EncodedConversation:
        """Removes the template's BOS and EOS, with blanks after EOS, if the same ids are put around every document.

        Otherwise a document would begin and end with two of them, unlike any other text.

        Args:
            before, after: ids put before and after a document; at most one each.
        """
        first, last = int(self.ids[:1].tolist() == list(before)), len(self.ids) - self.blanks - 1
        ends = bool(after) and self.ids[last : last + 1].tolist() == list(after)
        kept = slice(first, last if ends else len(self.ids))
        learnt = bool(self.mask[last]) if ends else self.end_learnt
        return replace(self, ids=self.ids[kept], mask=self.mask[kept], end_learnt=learnt)


class ChatEncoder:
    """Renders and tokenizes conversations.

    Args:
        folder: folder of the tokenizer, with a chat template.
        parse_special_tokens: whether a message may contain a literal special token, which then becomes that token.
        date: date that the template's `strftime_now` formats, e.g. "2026-01-31"; None refuses templates that need it.
    """

    def __init__(self, folder: Path, *, parse_special_tokens: bool, date: str | None = None) -> None:
        tokenizer = load(folder, parse_special_tokens=True)
        self._encode = _encoder(folder, tokenizer)
        special = {i: token for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._special = np.array(sorted(special), np.int64)
        about = {"special": [token.content for token in special.values()], "date": date}
        self._template = compile_template(read_template(folder), template_tokens(read_config(folder)), **about)
        self._forbidden = () if parse_special_tokens else tuple(token.content for token in special.values())

    def encode(self, line: str, *, everything: bool) -> EncodedConversation:
        """Encodes a conversation.

        Args:
            line: JSON, from `conversation_line`.
            everything: whether all tokens count in the loss, not only the assistant's.

        Raises:
            ConversationError: a message or a tool contains a special token, the tools are not a list, the template
                raises an error or does not print a message's tool calls, or the loss mask is all zeros.
        """
        read, tools = parse_conversation(line)
        messages = self._template.fit(read, tools=tools)
        check_no_special_tokens(messages, self._forbidden, where="a message")
        check_no_special_tokens(tools, self._forbidden, where="a tool")
        rendered = self._template.render(messages, tools=tools)
        ids, offsets = self._encode(rendered.text)
        spans = _learnt_spans(rendered, messages, everything=everything)
        mask = np.ones(len(ids), np.uint8) if everything else _assistant_mask(offsets, spans)
        if not mask.any():
            raise ConversationError("the assistant says nothing: no token would count in the loss")
        special = np.isin(ids, self._special)
        blank = [not rendered.text[a:b].strip() and not special[i] for i, (a, b) in enumerate(offsets)]
        end_learnt = learn_ends(mask, offsets, spans, blank=blank, special=special)
        blanks = [*blank[::-1], False].index(False)
        return EncodedConversation(rendered.text, ids, mask, end_learnt, blanks, rendered.unprinted)

    def learns_to_stop(self, *, append_eos: bool) -> bool:
        """Whether a token that ends the assistant's turn counts in the loss, in a conversation of two turns."""
        encoded = self._two_turns()
        if encoded is None:
            return True
        return (append_eos and encoded.end_learnt) or bool(np.isin(encoded.ids[encoded.mask == 1], self._special).any())

    def writes_end(self, eos: int) -> bool:
        """Whether the template ends a conversation with EOS; `without` leaves it out where every document gets one."""
        encoded = self._two_turns()
        return encoded is not None and encoded.ids[: len(encoded.ids) - encoded.blanks][-1:].tolist() == [eos]

    def _two_turns(self) -> EncodedConversation | None:
        """Encodes a conversation of two turns; None where the template only takes other conversations."""
        turn = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        try:
            return self.encode(conversation_line([*turn, *turn]), everything=False)
        except ConversationError:
            return None


@cache
def open_chat_encoder(folder: Path, *, parse_special_tokens: bool, date: str | None) -> ChatEncoder:
    """Opens a `ChatEncoder`; cached for the process's next tasks."""
    return ChatEncoder(folder, parse_special_tokens=parse_special_tokens, date=date)


def check_no_special_tokens(value: Any, forbidden: Sequence[str], *, where: str) -> None:
    """Refuses messages or tools that contain a literal special token, or a marker of `template.MARKERS`.

    Args:
        value: JSON value; its strings and keys are searched.
        forbidden: texts of the special tokens.
        where: subject of the error message, e.g. "a message".

    Raises:
        ConversationError: a special token or marker occurs.
    """
    for text in _strings(value):
        if found := next((token for token in forbidden if token in text), None):
            raise ConversationError(f"{where} contains {found!r}, which would become a special token")
        if found := next((marker for marker in MARKERS if marker in text), None):
            raise ConversationError(f"{where} contains {found!a}, which is reserved as a marker of assistant output")


def compile_template(source: str, tokens: Mapping[str, str | None], **about: Any) -> ChatTemplate:
    """Compiles a chat template; the arguments are those of `ChatTemplate`.

    Raises:
        DataError: the template does not compile.
    """
    try:
        return ChatTemplate(source, tokens, **about)
    except ConversationError as error:
        raise DataError(
            f"{error}\n  try: correct the template, or set tokenizer.chat_template to another file"
        ) from None


def read_template(folder: Path) -> str:
    """Reads the chat template of a tokenizer folder.

    Raises:
        DataError: the folder has none.
    """
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_config(folder).get("chat_template")
    if isinstance(template, list):  # several templates, by name
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        raise missing_template_error()
    return template


def missing_template_error() -> DataError:
    """The error for conversations without a chat template."""
    why = "a source has conversations, and the tokenizer has no chat template"
    return DataError(f'{why}\n  try: set "tokenizer": {{"chat_template": "FILE.jinja"}}')


def template_tokens(config: Mapping[str, Any]) -> dict[str, str | None]:
    """The special tokens that a chat template may use, from the contents of tokenizer_config.json.

    As in transformers: every key `..._token` that names a token, and the model's own named tokens.
    """
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        named |= config[key] if isinstance(config.get(key), dict) else {}
    return {name: token_text(token) for name, token in named.items()}


def _encoder(folder: Path, tokenizer: Any) -> Callable[[str], tuple[npt.NDArray[np.uint32], Offsets]]:
    """Makes a function that returns the ids of a text and the characters of each id."""
    if reference_of(folder) == "sentencepiece":
        from data_prep.tokenizer.sentencepiece_engine import SentencepieceEngine  # noqa: PLC0415 - few jobs need it

        return SentencepieceEngine(folder, parse_special_tokens=True).encode_with_offsets

    def encode(text: str) -> tuple[npt.NDArray[np.uint32], Offsets]:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.uint32), encoding.offsets

    return encode


def _learnt_spans(rendered: Rendered, messages: Messages, *, everything: bool) -> tuple[tuple[int, int], ...]:
    """The spans that count in the loss: the assistant's messages with a `weight` other than 0, or all of the text.

    Raises:
        ConversationError: a weight is neither 0 nor 1, does not fit `everything`, or cannot be related to a span; or
            another tool's key leaves a message out.
    """
    for message in messages:
        for key in _OTHER_WEIGHTS:
            if key in message and message[key] in (0, "0"):  # includes false
                raise ConversationError(f'a message has "{key}": {message[key]!r}: write "weight": 0 to leave it out')
    weights = [m.get("weight") for m in messages if m.get("role") == "assistant"]
    if unknown := [weight for weight in weights if weight not in (None, 0, 1)]:
        raise ConversationError(f'a message has "weight": {unknown[0]!r}, which is neither 0 nor 1')
    if 0 not in weights:
        return ((0, len(rendered.text)),) if everything else rendered.spans
    if everything:
        raise ConversationError('a message has "weight": 0, and "learn": "everything" counts all of them')
    if len(rendered.spans) != len(weights):
        why = f"the template has {len(rendered.spans)} generation blocks for {len(weights)} messages of the assistant"
        raise ConversationError(f'a message has "weight": 0, and {why}')
    return tuple(span for span, weight in zip(rendered.spans, weights, strict=True) if weight != 0)


_OTHER_WEIGHTS = ("train", "loss_mask")
"""Keys with which other tools leave messages out of the loss, in place of `weight`."""


def learn_ends(
    mask: npt.NDArray[np.uint8],
    offsets: Offsets,
    spans: Sequence[tuple[int, int]],
    *,
    blank: Sequence[bool],
    special: npt.NDArray[np.bool_],
) -> bool:
    """Sets the loss mask of the special token that ends a turn, if it follows the assistant's span.

    A span that ends in a special token (blanks may follow) stays unchanged. After any other span, the model would never
    learn to stop. So the special token that follows directly or after blanks is learnt, with these blanks: an end of
    turn behind the generation block, or the next role's token where a template has no end of turn.

    Args:
        mask: uint8 [n], changed in place.
        offsets: (start, end) of each token in the text, in characters.
        spans: (start, end) of each of the assistant's outputs in the text, in characters.
        blank: [n], whether a token is white space.
        special: [n], whether a token is special.

    Returns:
        Whether only blanks follow the last span, and no special token ends it: then EOS must count in the loss.
    """
    starts = np.array([start for start, _ in offsets], np.int64)
    for first, end in spans:
        behind = int((starts < end).sum())
        while behind and blank[behind - 1]:
            behind -= 1
        if end == first or not behind or special[behind - 1]:
            continue
        following = behind
        while following < len(mask) and blank[following]:
            following += 1
        if following == len(mask):
            mask[behind:] = 1
            return (first, end) == spans[-1]
        if special[following]:
            mask[behind : following + 1] = 1
    return False


def _assistant_mask(offsets: Offsets, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint8]:
    """The loss mask: 1 for tokens that share a character with a span of the assistant.

    A token that begins before the span, such as a template's blank joined to the answer's first word, counts, as in the
    mask of transformers: no other token has that word.
    """
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), np.uint8)
    for first, end in spans:
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
