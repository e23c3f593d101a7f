"""Text normalization for near-duplicate detection: token classes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data_prep.config.dedup import NearSection
from data_prep.dedup import minhash, words
from tests.data_prep.dedup.conftest import Batch, batch_of

TOKENS = ["the", " The", "THE", ");", "\n    ", "ß", "\ufffd", "\ufffd", "12", " 12,", "<|endoftext|>", "é", "É"]


def test_tokens_that_differ_in_case_and_blanks_only_have_one_class() -> None:
    classes = words.token_classes(TOKENS, special=[10])
    ignored = int(words.IGNORED)
    assert classes.tolist() == [0, 0, 0, ignored, ignored, 5, 6, 7, 8, 8, ignored, 11, 11]


def test_the_classes_of_a_trained_tokenizer(texts: list[str], tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*texts, "The end. the end"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    classes = words.tokenizer_token_classes(tmp_path / "tokenizer.json")
    ids = tokenizer.encode("the the The").ids
    assert len(classes) == tokenizer.get_vocab_size()
    assert len(set(ids)) == 3
    assert len(set(classes[ids].tolist())) == 1
    for ignored in ("<end>", "\n", ");"):
        assert (classes[tokenizer.encode(ignored).ids] == words.IGNORED).all()
    for byte in tokenizer.encode("\U0001f600").ids:  # bytes of a character are their own classes
        assert classes[byte] == byte


def test_a_document_with_too_few_words_is_compared_unchanged() -> None:
    classes = words.token_classes(TOKENS, special=[10])
    batch = batch_of([[3, 4, 3], [4, 4], [1, 3, 2, 9, 4, 5], [0, 0, 8, 5, 3, 3, 3]])
    ids, offsets = words.comparable_tokens(batch.ids, batch.offsets, classes=classes, ngram=4)
    assert ids.tolist() == [3, 4, 3, 4, 4, 0, 0, 8, 5, 0, 0, 8, 5]
    assert offsets.tolist() == [0, 3, 5, 9, 13]


def test_reindented_code_has_the_same_band_hashes(texts: list[str], tokenize: Callable[[list[str]], Batch]) -> None:
    # without letters that are others once they have been in upper case, such as ligatures
    texts = ["".join(char for char in text if char.upper().lower() == char.lower()) for text in texts]
    tabs = [re.sub("^ +", lambda m: "\t" * (len(m[0]) // 4), text, flags=re.MULTILINE) for text in texts]
    edited = [text.replace('"', "'").upper() for text in tabs]
    batch = tokenize(texts + edited)
    all_tokens = re.findall(r"\w+|\s+|.", "".join(texts + edited))
    classes = words.token_classes(list(dict.fromkeys(all_tokens)))
    section = NearSection()
    ids, offsets = words.comparable_tokens(batch.ids, batch.offsets, classes=classes, ngram=section.ngram)
    found = minhash.band_hashes(ids, offsets, section=section)
    np.testing.assert_array_equal(found[: len(texts)], found[len(texts) :])
