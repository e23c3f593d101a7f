"""How texts become ids."""

from __future__ import annotations

from dataclasses import dataclass

ENGINE_FILE = "engine.json"
"""Beside a tokenizer folder: which engine was proven to give its ids, and why others were not taken."""


@dataclass(frozen=True, slots=True)
class TextPolicy:
    """How texts become ids.

    Attributes:
        bos, eos: whether every document begins with the one and ends with the other.
        special: whether a special token that is spelt out in a text becomes the token.
    """

    bos: bool
    eos: bool
    special: bool
