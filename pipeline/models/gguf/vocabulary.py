"""Reads the tokens of a GGUF file and compares them with a tokenizer. No torch."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader, Keys

from foundation.errors import DataError


def stored_tokens(file: Path) -> list[str]:
    """Reads every token of a GGUF file by id; most writers call unused ids [PAD<id>].

    Raises:
        DataError: the file is damaged or has no tokens.
    """
    try:
        field = GGUFReader(file).get_field(Keys.Tokenizer.LIST)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is damaged: {error}\n  try: copy or quantize it again") from None
    if field is None:
        raise DataError(f"{file} has no tokenizer ({Keys.Tokenizer.LIST})\n  try: quantize a folder with a tokenizer")
    return [str(token) for token in field.contents()]


def first_difference(tokens: list[str], tokenizer: Path) -> str | None:
    """Describes the first difference between a GGUF file's tokens and a tokenizer.json; None if they agree.

    Args:
        tokens: tokens of the file, by id; there may be more than the tokenizer's, if the vocabulary is padded.
        tokenizer: the tokenizer.json.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415

    for token, number in sorted(Tokenizer.from_file(str(tokenizer)).get_vocab().items(), key=lambda item: item[1]):
        if number >= len(tokens):
            return f"it has no id {number}, which is {token!r}"
        if tokens[number] != token and tokens[number] != token.replace("\u2581", " "):  # some converters write it so
            return f"its id {number} is {tokens[number]!r}, not {token!r}"
    return None
