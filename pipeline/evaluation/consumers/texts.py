"""Texts whose token ids must be equal in every consumer: from windows, from single tokens, and awkward ones.

No torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from foundation.foreign_json import read_json
from pipeline.models.split_names import words_without_merges

_MOST = 64
"""Largest number of texts of windows."""
_MOST_TOKENS = 256
"""Largest number of texts of single tokens."""

AWKWARD = (
    "",
    " ",
    "  two spaces",
    "a\n\n\nb\t\tc \n d",
    "trailing space ",
    "don't can't WE'LL I'd",
    "1234567890 3.14159 1,000,000 0x7f",
    "def f(x):\n    return x  # comment\n\n\nclass A:\n\tpass\n",
    "Stra\u00dfe naïve café coöperate Ærø",
    "Привет, мир! Это проверка.",
    "你好,世界。東京は晴れです。안녕하세요",
    "مرحبا بالعالم שלום עולם",
    "👩‍👩‍👧‍👦🇩🇪 👍🏽 ok",
    "e\u0301 vs \u00e9, \u200bzero\u00a0width\ufeff",
    "https://example.org/a?b=c&d=%20#e user@example.org",
    "<|endoftext|> and <s> </s> as plain text",
    "a" * 200,
    "!!!???...---___***///\\\\\\",
    "\r\nwindows\r\nlines\r\n",
    "MiXeD CaSe snake_case camelCase kebab-case",
)


def texts_of(model: Path, windows: npt.NDArray[np.int64]) -> tuple[str, ...]:
    """The awkward texts and, if the folder has a tokenizer, texts of windows [n, T] and of single tokens."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return AWKWARD
    tokenizer = Tokenizer.from_file(str(file))
    step = max(1, len(windows) // _MOST)
    decoded = tuple(tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in windows[::step][:_MOST])
    return AWKWARD + decoded + _single_tokens(tokenizer, file)


def _single_tokens(tokenizer: Tokenizer, file: Path) -> tuple[str, ...]:
    """Texts of words that no merges make (as in Llama 3) and of evenly spread tokens, without parts of characters.

    A program that ignores such words, or has other scores, gives other ids on tokens that the windows lack.
    """
    model = read_json(file)["model"]
    words = words_without_merges({"model": model}) if model["type"] == "BPE" else []
    chosen = _spread([number for word in words if (number := tokenizer.token_to_id(word)) is not None])
    chosen += _spread(list(range(tokenizer.get_vocab_size())))
    texts = tokenizer.decode_batch([[number] for number in chosen], skip_special_tokens=True)
    return tuple(dict.fromkeys(text for text in texts if text and "\ufffd" not in text))


def _spread(ids: list[int]) -> list[int]:
    return ids[:: max(1, len(ids) // (_MOST_TOKENS // 2))][: _MOST_TOKENS // 2]
