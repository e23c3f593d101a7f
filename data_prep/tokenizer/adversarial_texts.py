"""Adversarial texts: if two implementations of one tokenizer differ, they differ on these."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable
from typing import Literal

ADVERSARIAL_TEXTS = (
    "",
    " ",
    "  two leading, two trailing  ",
    "tabs\tand\t\ttabs",
    "CRLF\r\nlines\r\n\r\nand LF\n\n\nand CR\r",
    "NUL \x00 in the middle\x00",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "e\u0301 composed é; a lone mark: \u0301 and \u0301\u0302\u0303",
    "zero width \u200b joiner \u200d and BOM \ufeff inside",
    "中文没有空格。日本語もない。ไทยก็ไม่มี",
    "עברית and العربية, right to left",
    "def f(x):\n    if x:\n\t\treturn x ** 2  # 12345.678e-9\n",
    "<|endoftext|> <s></s><unk> <pad> [INST] <|im_start|> <0x0A>",
    "▁▁ the blank sign itself ▁x",
    "ﬁ ligature, ½, ①, Ａ full width, ℌ, ſ",
    "a" * 300,
    " " * 50 + "deep",
    "\x01\x7f\x80\x9f control characters \ue000 \U0010ffff",
    "don't DON'T we'll I'd 's 'S ''s",
)

_TEXTS, _MAX_PIECES = 1500, 12
_RANGES = (
    *((0x20, 0x7E), (0xA0, 0x24F), (0x250, 0x36F), (0x370, 0x52F), (0x530, 0x6FF), (0x700, 0xDFF), (0xE00, 0x109F)),
    *((0x10A0, 0x18AF), (0x1E00, 0x20CF), (0x2000, 0x206F), (0x20D0, 0x2BFF), (0x3000, 0x33FF), (0x4E00, 0x9FFF)),
    *((0xA000, 0xABFF), (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xF900, 0xFDFF), (0xFE00, 0xFFFD), (0x10000, 0x103FF)),
    *((0x10900, 0x1095F), (0x11000, 0x11DFF), (0x16A00, 0x16F9F), (0x1D400, 0x1D7FF), (0x1F000, 0x1FAFF)),
    (0x323B0, 0x3347F),
)
"""Inclusive ranges of code points from which random texts are drawn; some were added in Unicode 17."""
_WORDS = (
    *(
        "don't",
        "WE'LL",
        "'s",
        "12345678",
        "3.14",
        "  ",
        "\t\t",
        "\n\n",
        "\r\n",
        " \n ",
        "hello",
        " World",
        "____",
        "<s>",
    ),
    *("\uff21\uff22", "\u00df", "\u017f"),  # full width, sharp s, long s
)


_WRITTEN = (
    "Tôi yêu tiếng Việt, những dòng sông ở Huế",
    "한국어 문장은 여기에 있습니다",
    "Čeština: příliš žluťoučký kůň, naïve façade São Tomé",
    "Ελληνικά: Άγιος Ὅμηρος ᾧ, Русский: ёлка, й",
    "اَلْعَرَبِيَّةُ ﷺ لإ שָׁלוֹם עֲלֵיכֶם",
    "हिन्दी क़लम ज़मीन বাংলা কো தமிழ் கொடி",
    "ไทยน้ำ ກໍາ ཀྲིས་ ཱི မြန်မာဘာသာ",
    "がぎぐげご パピプペポ ｶﾞｷﾞ 漢字 豈 更 㐂",
    "Å Å Ω ½ ™ ﬀ ﬃ ² ₂ Ⅳ ㈱ ㎏ … 𝐇𝐞𝐥𝐥𝐨 ｆｕｌｌ　ｗｉｄｔｈ",
    "a\u0323\u0302 \u1ead \u1112\u1161\u11ab",
)
"""Texts in scripts whose letters have several normal forms."""


def normal_forms() -> list[str]:
    """Texts in many scripts, each in Unicode's four normal forms: normalizers differ there first."""
    forms: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")
    return [unicodedata.normalize(form, text) for text in _WRITTEN for form in forms]


def random_texts() -> list[str]:
    """1,500 random texts of all scripts, whitespace and punctuation, from a fixed seed: the same on every machine."""
    draw = random.Random(20260101).random
    return ["".join([_piece(draw) for _ in range(1 + int(_MAX_PIECES * draw()))]) for _ in range(_TEXTS)]


def _piece(draw: Callable[[], float]) -> str:
    """Draws a word, or 1 to 4 characters from a code point range; `draw`, which costs most, returns 0 <= x < 1."""
    if draw() < 0.5:
        return _WORDS[int(len(_WORDS) * draw())]
    first, last = _RANGES[int(len(_RANGES) * draw())]
    size = last - first + 1
    return "".join([chr(first + int(size * draw())) for _ in range(1 + int(4 * draw()))])
