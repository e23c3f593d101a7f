"""Policy for BOS, EOS and special tokens when texts are tokenized."""

from __future__ import annotations

from dataclasses import dataclass

ENGINE_FILE = "engine.json"
"""File beside a tokenizer folder: the engine whose ids were verified, and why other engines were rejected."""


@dataclass(frozen=True, slots=True)
class TextPolicy:
    """Rules for turning texts into ids.

    Attributes:
        prepend_bos: whether every document begins with the BOS (beginning-of-sequence) token.
        append_eos: whether every document ends with the EOS (end-of-document) token.
        parse_special_tokens: whether the literal text of a special token in a document becomes that token.
    """

    prepend_bos: bool
    append_eos: bool
    parse_special_tokens: bool
