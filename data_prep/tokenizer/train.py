"""Tokenizer training (byte-level BPE, sentencepiece unigram and BPE), written as a Hugging Face folder.

Training is deterministic. Byte-level BPE breaks ties by ids (verified equal with 1 and 2 threads). sentencepiece sums
floats per thread: its number of threads is a constant.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from data_prep.config.corpus import TokenizerSection
from data_prep.tokenizer import sentencepiece_model
from data_prep.tokenizer.fingerprint import MODEL_FILE, TOKENIZER_JSON
from data_prep.tokenizer.load import REFERENCE, TOKENIZER_CONFIG
from data_prep.tokenizer.long_words import NAMED_CHARACTERS, cut_long_words
from foundation.directory import write_json
from foundation.errors import ConfigError

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's split pattern: words with one leading punctuation mark, up to three digits, runs of whitespace."""

_THREADS = 4  # for sentencepiece; constant, as the model depends on it (4 threads are about 1.8 times as fast as 1)
_MAX_LINE_BYTES = 1 << 16
_UNBOUNDED = 10**30  # transformers' value for "no limit"


def train(texts: Iterable[str], folder: Path, section: TokenizerSection) -> None:
    """Trains a tokenizer and writes tokenizer.json and tokenizer_config.json (and tokenizer.model) into `folder`.

    Args:
        texts: training texts; very long words in them are cut (`long_words.py`).
        folder: existing directory to write into.
        section: config section with kind, vocabulary size and special tokens.

    Raises:
        ConfigError: there are too few texts for a vocabulary of that size.
    """
    # in unigram training every substring of a word is a candidate: a line of DNA of 1 MB would take minutes, cut or not
    unigram = section.train == "sentencepiece-unigram"
    texts = cut_long_words(texts, longest=NAMED_CHARACTERS if unigram else None)
    if section.train == "bpe":
        tokenizer = _train_bpe(texts, section)
    else:
        model = _train_sentencepiece(texts, section)
        (folder / MODEL_FILE).write_bytes(model)
        tokenizer = sentencepiece_model.convert(model)
    write_folder(tokenizer, folder, eos_token=section.eos_token, bos_token=section.bos_token)


def write_folder(
    tokenizer: Any, folder: Path, *, eos_token: str | None, bos_token: str | None = None, reference: str | None = None
) -> None:
    """Writes a tokenizer as a folder that `AutoTokenizer.from_pretrained` loads without changes.

    Args:
        reference: reference library to record (`load.reference_of`); None: `tokenizers`.
    """
    # its own `save` raises a bare Exception for a full disk
    (folder / TOKENIZER_JSON).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    names = {"eos_token": eos_token, "bos_token": bos_token, REFERENCE: reference}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _UNBOUNDED,
    }
    write_json(folder / TOKENIZER_CONFIG, config | {k: v for k, v in names.items() if v is not None})


def _train_bpe(texts: Iterable[str], section: TokenizerSection) -> Any:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    specials = section.all_special_tokens()
    trainer = trainers.BpeTrainer(
        vocab_size=section.vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _train_sentencepiece(texts: Iterable[str], section: TokenizerSection) -> bytes:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_training_lines(texts),
            model_writer=model,
            model_type=str(section.train).removeprefix("sentencepiece-"),
            vocab_size=section.vocab_size,
            num_threads=_THREADS,
            max_sentence_length=_MAX_LINE_BYTES,
            control_symbols=section.special_tokens,
            minloglevel=2,
            **_LOSSLESS,
            **_special_token_ids(section),
        )
    except RuntimeError as error:
        remedy = "set another vocab_size, or give more text"
        if (found := _TOO_SMALL.search(str(error))) is not None:
            remedy = f"{found[1]} or more: one for each different character of the training text"
        raise ConfigError("tokenizer.vocab_size", section.vocab_size, why=str(error), remedy=remedy) from None
    return model.getvalue()


_TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
_LOSSLESS: dict[str, Any] = {
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "hard_vocab_limit": False,
    # every printable ASCII character is a piece, even if it is rare
    "required_chars": "".join(map(chr, range(0x21, 0x7F))),
}
"""Settings under which every text decodes to itself (except a literal U+2581, sentencepiece's mark for a space, which
decodes to a space)."""


def _special_token_ids(section: TokenizerSection) -> dict[str, Any]:
    bos = {"bos_id": -1} if section.bos_token is None else {"bos_id": 2, "bos_piece": section.bos_token}
    return {"unk_id": 0, "eos_id": 1, "pad_id": -1, "eos_piece": section.eos_token, **bos}


def _training_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yields lines for sentencepiece: a NUL would end a line early; a line over the size limit would be dropped."""
    for text in texts:
        for line in text.replace("\0", " ").split("\n"):
            for start in range(0, len(line), _MAX_LINE_BYTES // 4):
                yield line[start : start + _MAX_LINE_BYTES // 4]
