"""Texts on which two implementations of one tokenizer part ways if they ever do."""

from __future__ import annotations

PROBES = (
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
