"""MinHash signatures estimate the Jaccard similarity, and depend only on the document's tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data_prep.config.dedup import NearSection
from data_prep.dedup import minhash, words
from data_prep.hashing import mix
from tests.data_prep.dedup.conftest import Batch, batch_of, real_texts

SECTION = NearSection()
Tokenize = Callable[[list[str]], Batch]
TOKENS = ["the", " The", "THE", ");", "\n    ", "ß", "\ufffd", "\ufffd", "12", " 12,", "<|endoftext|>", "é", "É"]


def test_window_hashes_follow_the_formula_of_their_docstring() -> None:
    ids = np.random.default_rng(0).integers(0, 1 << 32, 40, dtype=np.uint64)
    for ngram in (1, 2, 3, 5, 7, 8, 13):
        base = [
            sum(int(v) * minhash.BASE ** (ngram - 1 - j) for j, v in enumerate(ids[n : n + ngram])) for n in range(20)
        ]
        literal = np.array([(b + minhash.BASE) % (1 << 64) for b in base], dtype=np.uint64)
        np.testing.assert_array_equal(minhash.window_hashes(ids, ngram=ngram)[:20], mix(literal))


@pytest.mark.integration
@pytest.mark.parametrize(
    "share", [pytest.param(0.01, marks=pytest.mark.sweep), 0.03, pytest.param(0.08, marks=pytest.mark.sweep)]
)
def test_equal_minima_estimate_the_jaccard_similarity(texts: list[str], tokenize: Tokenize, share: float) -> None:
    rng = random.Random(0)
    pairs = [(text, " ".join(w for w in text.split(" ") if rng.random() > share)) for text in texts]
    batch = tokenize([text for pair in pairs for text in pair])
    minima = minhash.signatures(batch.ids, batch.offsets, section=SECTION)
    found = (minima[::2] == minima[1::2]).mean(axis=1)
    truth = np.array([jaccard(batch.document(n), batch.document(n + 1)) for n in range(0, 2 * len(pairs), 2)])
    deviation = np.sqrt(truth * (1 - truth) / SECTION.slots)  # of one pair
    # documents of one project share n-grams, so errors are correlated: a quarter of a pair's, not 1 / sqrt(pairs)
    assert abs((found - truth).mean()) < deviation.mean() / 4
    assert (abs(found - truth) < 5 * deviation + 1e-9).all()
    assert 0.6 < np.sqrt(((found - truth) ** 2).mean() / (deviation**2).mean()) < 1.2


def test_the_estimate_is_as_good_for_short_documents() -> None:
    rng = np.random.default_rng(1)
    for tokens in (12, 40, 150):
        firsts = rng.integers(0, 5000, (500, tokens))
        seconds = np.where(rng.random((500, tokens)) < 0.03, 7777, firsts)
        batch = batch_of([d for pair in zip(firsts.tolist(), seconds.tolist(), strict=True) for d in pair])
        minima = minhash.signatures(batch.ids, batch.offsets, section=SECTION)
        found = (minima[::2] == minima[1::2]).mean(axis=1)
        truth = np.array([jaccard(a, b) for a, b in zip(firsts, seconds, strict=True)])
        assert abs((found - truth).mean()) < 0.006  # 4 standard deviations: 4 x 0.034 / sqrt(500)
        assert (minima != minhash.EMPTY).all()


@settings(deadline=None, max_examples=20)
@given(cuts=st.lists(st.integers(0, 60), max_size=5), ngram=st.sampled_from([3, 5, 8]))
def test_band_hashes_depend_only_on_the_document(cuts: list[int], ngram: int) -> None:
    documents = [[len(word) for word in text.split()] for text in real_texts()[:60]]
    section = NearSection(ngram=ngram, bands=4, rows=3)
    whole = bands(documents, section)
    bounds = [0, *sorted(cuts), 60]
    parts = [bands(documents[a:b], section) for a, b in pairwise(bounds) if a < b]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("block", [16, 100, 4096])
def test_band_hashes_do_not_depend_on_the_block_size(
    texts: list[str], tokenize: Tokenize, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = tokenize([texts[0][:40], *texts[1:12], texts[0][:10], ""])
    expected = minhash.band_hashes(batch.ids, batch.offsets, section=SECTION)
    monkeypatch.setattr(minhash, "_BLOCK", block)
    np.testing.assert_array_equal(minhash.band_hashes(batch.ids, batch.offsets, section=SECTION), expected)


def test_a_document_shorter_than_a_window_shares_bands_only_with_equal_documents() -> None:
    documents = [[1, 2], [1, 2], [1, 2, 0], [0, 1, 2], [1], [], [1, 2, 3, 4, 5], [1, 2, 3, 4]]
    found = bands(documents, SECTION)
    np.testing.assert_array_equal(found[0], found[1])
    assert len(np.unique(found)) == (len(documents) - 1) * SECTION.bands


def test_repeated_n_grams_do_not_change_the_band_hashes() -> None:
    once, often = [7] * SECTION.ngram, [7] * 50_000
    found = bands([once, often, [3, 4] * 4, [3, 4] * 9_000], SECTION)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[2], found[3])


def test_an_empty_batch_has_no_band_hashes() -> None:
    assert bands([], SECTION).shape == (0, SECTION.bands)


def test_band_hashes_equal_those_of_earlier_versions() -> None:
    """Band hashes are on disk: another formula would find no duplicates between a job's old and new runs."""
    found = bands([list(range(1000)), [5, 4, 3, 2, 1, 0]], SECTION)
    assert found[0, :2].tolist() == GOLDEN_LONG
    assert found[1, :2].tolist() == GOLDEN_SHORT


GOLDEN_LONG = [5682665056819140649, 6949361427021997117]


GOLDEN_SHORT = [3258556891566624908, 4340110328800411867]


def bands(documents: list[list[int]], section: NearSection) -> np.ndarray:
    """uint64[documents, bands]."""
    batch = batch_of(documents)
    return minhash.band_hashes(batch.ids, batch.offsets, section=section)


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Exact, of the sets of n-grams."""
    a, b = ({tuple(d[n : n + SECTION.ngram].tolist()) for n in range(len(d) - SECTION.ngram + 1)} for d in (one, other))
    return len(a & b) / len(a | b)


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
