"""Tokenizer for map tasks: the chosen engine, the BOS and EOS ids added to each document, and the dtype of ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.config.text_policy import ENGINE_FILE, TextPolicy
from data_prep.formats.tokenfile import dtype_for
from data_prep.tokenizer.engine_choice import check_sample
from data_prep.tokenizer.engines import TokenizerEngine, Tokens, open_engine
from data_prep.tokenizer.load import load, special_ids, vocab_size


@dataclass(frozen=True)
class Encoder:
    """Encodes texts as token ids.

    Attributes:
        engine: the tokenization engine.
        folder: folder of the tokenizer.
        parse_special_tokens: whether a literal special token in a text becomes that token.
        prefix_ids: ids put before every document (BOS, or none).
        suffix_ids: ids put after every document (EOS, or none).
        dtype: dtype of the ids in token files.
    """

    engine: TokenizerEngine
    folder: Path
    parse_special_tokens: bool
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def added_ids(self) -> int:
        """Number of ids added to every document."""
        return len(self.prefix_ids) + len(self.suffix_ids)

    def encode(self, texts: list[str]) -> Tokens:
        """Encodes each text as ids, without BOS and EOS."""
        return self.engine.encode(texts)

    def check(self, texts: list[str], *, where: str) -> None:
        """Verifies the engine on texts (`engine_choice.check_sample`)."""
        check_sample(self.engine, self.folder, texts, parse_special_tokens=self.parse_special_tokens, where=where)


@cache
def open_encoder(folder: Path, policy: TextPolicy) -> Encoder:
    """Opens a tokenizer folder with the engine named in its `ENGINE_FILE`; cached for the process's next tasks."""
    engine = json.loads((folder.parent / ENGINE_FILE).read_text())["engine"]
    tokenizer = load(folder)
    ids = special_ids(folder, tokenizer)
    before = (ids["bos_id"],) if policy.prepend_bos else ()
    after = (ids["eos_id"],) if policy.append_eos else ()
    return Encoder(
        open_engine(engine, folder, parse_special_tokens=policy.parse_special_tokens),
        folder,
        policy.parse_special_tokens,
        tuple(i for i in before if i is not None),
        tuple(i for i in after if i is not None),
        dtype_for(vocab_size(tokenizer)),
    )
