"""Text normalization for near-duplicate detection: only words count, without case, white space and punctuation.

Texts are compared as tokens, and the vocabulary is normalized once. Tokens that differ only in case and white space
(`The`, ` the`) have the same class, and tokens without letters or digits (`);`, blanks) are ignored. One look-up then
turns a batch of token ids into classes, which finds reformatted or reindented duplicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.dedup.minhash import Ids, Offsets

IGNORED = np.uint32(0xFFFFFFFF)
"""Class of tokens that are not compared."""


def tokenizer_token_classes(file: Path) -> NDArray[np.uint32]:
    """`token_classes` of a Hugging Face tokenizer.json; its special tokens are ignored. 0.2 s for 32,000 tokens."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - only one task of a job needs it; the others read its result

    tokenizer = Tokenizer.from_file(str(file))
    last = max(tokenizer.get_vocab(with_added_tokens=True).values())
    tokens = [tokenizer.decode([number], skip_special_tokens=False) for number in range(last + 1)]
    added = tokenizer.get_added_tokens_decoder()
    return token_classes(tokens, special=[number for number, token in added.items() if token.special])


def token_classes(tokens: Sequence[str], *, special: Iterable[int] = ()) -> NDArray[np.uint32]:
    """The class of each token: the smallest id with the same letters and digits, in lower case.

    Args:
        tokens: text of each id, decoded alone. A part of a character (decoded to U+FFFD) is its own class.
        special: ids that occur in no text, such as the end of a document; they are ignored.

    Returns:
        uint32[vocabulary]; `IGNORED` for tokens without letters or digits.
    """
    classes = np.arange(len(tokens), dtype=np.uint32)
    first: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if "\ufffd" not in token:
            word = "".join(filter(str.isalnum, token)).lower()
            classes[number] = first.setdefault(word, number) if word else IGNORED
    classes[list(special)] = IGNORED
    return classes


def comparable_tokens(ids: Ids, offsets: Offsets, *, classes: NDArray[np.uint32], ngram: int) -> tuple[Ids, Offsets]:
    """Replaces the token ids of a batch by their classes and removes ignored tokens, for `minhash.band_hashes`.

    A document with fewer than `ngram` tokens left is compared unchanged. Otherwise short tables of signs and numbers,
    or texts of punctuation, would be duplicates of each other.

    Args:
        ids: uint32[n].
        offsets: int64[docs + 1].
        classes: uint32[vocabulary], result of `token_classes`.
        ngram: tokens per n-gram.
    """
    of_ids = classes[ids]
    kept = of_ids != IGNORED
    counts = np.diff(np.concatenate([[0], np.cumsum(kept)])[offsets])
    for document in np.flatnonzero(counts < ngram):
        tokens = slice(offsets[document], offsets[document + 1])
        of_ids[tokens], kept[tokens], counts[document] = ids[tokens], True, tokens.stop - tokens.start
    return of_ids[kept], np.concatenate([[0], np.cumsum(counts)])
