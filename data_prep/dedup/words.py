"""What near-deduplication compares of a text: its words, without case, blanks and punctuation.

Texts are compared as tokens, so this is done to the vocabulary, once: every token belongs to a class, the same for
tokens that say the same (`The`, ` the`), and tokens that say nothing (`);`, blanks) have none. A batch of token ids is
then a batch of classes by one look-up, and reformatted or reindented copies are seen as what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.dedup.minhash import Ids, Offsets

NOTHING = np.uint32(0xFFFFFFFF)
"""The class of tokens that are not compared."""


def tokenizer_classes(file: Path) -> NDArray[np.uint32]:
    """`token_classes` of a Hugging Face tokenizer.json; its special tokens say nothing. 0.2 s for 32,000 tokens."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - one task of a job needs it, and all read what it has made

    tokenizer = Tokenizer.from_file(str(file))
    last = max(tokenizer.get_vocab(with_added_tokens=True).values())
    tokens = [tokenizer.decode([number], skip_special_tokens=False) for number in range(last + 1)]
    added = tokenizer.get_added_tokens_decoder()
    return token_classes(tokens, special=[number for number, token in added.items() if token.special])


def token_classes(tokens: Sequence[str], *, special: Iterable[int] = ()) -> NDArray[np.uint32]:
    """uint32[vocabulary]: of each token the smallest id that says the same, or `NOTHING`.

    Args:
        tokens: what each id is decoded to on its own. A part of a character (U+FFFD once decoded) is its own class.
        special: ids that no text has, such as the end of a document: they say nothing.
    """
    classes = np.arange(len(tokens), dtype=np.uint32)
    first: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if "\ufffd" not in token:
            said = "".join(filter(str.isalnum, token)).lower()
            classes[number] = first.setdefault(said, number) if said else NOTHING
    classes[list(special)] = NOTHING
    return classes


def compared(ids: Ids, offsets: Offsets, *, classes: NDArray[np.uint32], ngram: int) -> tuple[Ids, Offsets]:
    """A batch's token ids and offsets as `minhash.bands` takes them, in classes and without what says nothing.

    A document of which fewer than `ngram` tokens are left is compared as it is: short tables of signs and numbers, or
    nothing but punctuation, would otherwise be copies of each other.

    Args:
        ids: uint32[n].
        offsets: int64[docs + 1].
        classes: uint32[vocabulary], of `token_classes`.
        ngram: the section's.
    """
    of_ids = classes[ids]
    kept = of_ids != NOTHING
    counts = np.diff(np.concatenate([[0], np.cumsum(kept)])[offsets])
    for document in np.flatnonzero(counts < ngram):
        here = slice(offsets[document], offsets[document + 1])
        of_ids[here], kept[here], counts[document] = ids[here], True, here.stop - here.start
    return of_ids[kept], np.concatenate([[0], np.cumsum(counts)])
