"""The tokenization engine `sentencepiece`, with the offsets of tokens in a text, which conversations need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.tokenizer import sentencepiece_model
from data_prep.tokenizer.engines import EngineName, Tokens
from data_prep.tokenizer.load import load


class SentencepieceEngine:
    """The `sentencepiece` library: the reference for a tokenizer given as a sentencepiece model.

    With `parse_special_tokens` a text is cut at literal control symbols, as in `tokenizers`; sentencepiece itself never
    reads one. If transformers numbers the pieces differently, ids are those of the tokenizer.json beside the model.
    """

    name: EngineName = "sentencepiece"

    def __init__(self, folder: Path, *, parse_special_tokens: bool) -> None:
        model = sentencepiece_model.reference_model(folder)
        tokenizer = load(folder)
        self._processor = sentencepiece_model.open_processor(model)
        pieces = sentencepiece_model.pieces_of(model)
        self._ids = np.array([tokenizer.token_to_id(piece) for piece in pieces], np.uint32)
        added = tokenizer.get_added_tokens_decoder().items() if parse_special_tokens else ()
        self._special = {token.content: number for number, token in added if token.special}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._cut = re.compile("|".join(f"({re.escape(text)})" for text in longest_first)) if longest_first else None

    def encode(self, texts: list[str]) -> Tokens:
        """Implements `Engine.encode`."""
        if self._cut is None:
            parts = [np.array(ids, np.uint32) for ids in self._processor.encode(texts, num_threads=1)]
            parts = [self._ids[part] for part in parts]
        else:
            parts = [self.encode_with_offsets(text)[0] for text in texts]
        offsets = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return Tokens(np.concatenate([np.empty(0, np.uint32), *parts]), offsets)

    def encode_with_offsets(self, text: str) -> tuple[npt.NDArray[np.uint32], list[tuple[int, int]]]:
        """Encodes a text; returns ids, and the (start, end) of each id in characters, end exclusive."""
        ids: list[npt.NDArray[np.uint32]] = [np.empty(0, np.uint32)]
        offsets: list[tuple[int, int]] = []
        for start, end, special in self._segments(text):
            if special is not None:
                ids.append(np.array([special], np.uint32))
                offsets.append((start, end))
                continue
            found, places = _encode_with_offsets(self._processor, text[start:end])
            ids.append(self._ids[found])
            offsets += [(start + first, start + last) for first, last in places]
        return np.concatenate(ids), offsets

    def _segments(self, text: str) -> Iterator[tuple[int, int, int | None]]:
        """Yields (start, end, id of the special token or None) for each non-empty piece of a text."""
        at = 0
        for match in self._cut.finditer(text) if self._cut is not None else ():
            if match.start() > at:
                yield at, match.start(), None
            yield match.start(), match.end(), self._special[match.group()]
            at = match.end()
        if at < len(text):
            yield at, len(text), None


def _encode_with_offsets(processor: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Encodes a text; returns ids, and the (start, end) of each id in characters."""
    if hasattr(processor, "encode_as_offset_mapping"):
        found = processor.encode_as_offset_mapping(text)
        return found["ids"], found["offsets"]
    pieces = processor.encode_as_immutable_proto(text).pieces  # sentencepiece 0.2.1
    return [piece.id for piece in pieces], [(piece.begin, piece.end) for piece in pieces]
