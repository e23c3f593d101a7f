"""Texts whose token ids have to be equal in every consumer: those of the windows, and awkward ones. No torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

_MOST = 64
"""Texts of windows."""

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
    """The awkward texts, and what the tokenizer of a folder decodes windows [n, T] to; only those without one."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return AWKWARD
    tokenizer = Tokenizer.from_file(str(file))
    step = max(1, len(windows) // _MOST)
    return AWKWARD + tuple(tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in windows[::step][:_MOST])
