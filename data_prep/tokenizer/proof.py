"""Which engine tokenises a corpus: the fastest that gives the reference's ids on hard texts and on the corpus itself.

The proof is made once, when the tokenizer is made, on adversarial texts and on a sample of the corpus; and again in
every map task, on a sample of its documents. An engine that fails the first is replaced by the next, and one that fails
the second ends the job: documents before that one may be wrong, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from data_prep.tokenizer.engines import CANDIDATES, Engine, EngineName, Tokens, difference, installed, open_engine
from data_prep.tokenizer.probes import PROBES
from headrace.base.errors import ConfigError, DataError

_FUZZ_TEXTS, _FUZZ_PIECES = 1500, 12
_RANGES = (
    *((0x20, 0x7E), (0xA0, 0x24F), (0x250, 0x36F), (0x370, 0x52F), (0x530, 0x6FF), (0x700, 0xDFF), (0xE00, 0x109F)),
    *((0x10A0, 0x18AF), (0x1E00, 0x20CF), (0x2000, 0x206F), (0x20D0, 0x2BFF), (0x3000, 0x33FF), (0x4E00, 0x9FFF)),
    *((0xA000, 0xABFF), (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xF900, 0xFDFF), (0xFE00, 0xFFFD), (0x10000, 0x103FF)),
    *((0x10900, 0x1095F), (0x11000, 0x11DFF), (0x16A00, 0x16F9F), (0x1D400, 0x1D7FF), (0x1F000, 0x1FAFF)),
    (0x323B0, 0x3347F),
)
"""Inclusive ranges of code points that random texts are drawn from; among them ones that are new in Unicode 17."""
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


@dataclass(frozen=True)
class Choice:
    """The engine of a job, and what became of those before it: (name, why it was not taken)."""

    engine: EngineName
    refused: tuple[tuple[str, str], ...]


def choose(wanted: str, folder: Path, *, special: bool, sample: list[str]) -> Choice:
    """Finds the engine for a tokenizer.

    Args:
        wanted: an engine's name, or "auto".
        special: see `open_engine`.
        sample: texts of the corpus.

    Raises:
        ConfigError: the engine that was asked for by name does not do.
    """
    names = CANDIDATES if wanted == "auto" else [n for n in CANDIDATES if n == wanted]
    with ThreadPoolExecutor(1) as pool:  # 0.3 s and 0.2 s, in which neither holds the interpreter's lock
        for name in names[:1]:
            pool.submit(open_engine, name, folder, special=special)
        reference = open_engine("tokenizers", folder, special=special)
        texts = [*PROBES, *fuzz(), *sample]
        expected = reference.encode(texts)
    refused: list[tuple[str, str]] = []
    for name in names:
        why = _why_not(name, reference, folder, special=special, texts=texts, expected=expected)
        if why is None:
            return Choice(name, tuple(refused))
        refused.append((name, why))
    if wanted not in ("auto", "tokenizers"):
        raise ConfigError("tokenizer.engine", wanted, why=refused[0][1], remedy='"auto" or "tokenizers"')
    return Choice("tokenizers", tuple(refused))


def check_sample(engine: Engine, folder: Path, texts: list[str], *, special: bool, where: str) -> None:
    """Compares an engine with the reference on some texts.

    Raises:
        DataError: with the text on which they differ.
    """
    if engine.name == "tokenizers" or not texts:
        return
    reference = open_engine("tokenizers", folder, special=special)
    differing = difference(engine, reference, texts, reference.encode(texts))
    if differing is not None:
        why = f"{where}: {engine.name} and tokenizers give different ids for {differing[:80]!r}"
        raise DataError(f'{why}\n  try: "tokenizer": {{"engine": "tokenizers"}}, and remove the job directory')


def fuzz() -> list[str]:
    """Random texts of all scripts, blanks and marks; the same on every machine."""
    draw = random.Random(20260101).random
    return ["".join([_piece(draw) for _ in range(1 + int(_FUZZ_PIECES * draw()))]) for _ in range(_FUZZ_TEXTS)]


def _piece(draw: Callable[[], float]) -> str:
    """A word, or one to four characters of a range; `draw` gives numbers in [0, 1), and is most of the cost."""
    if draw() < 0.5:
        return _WORDS[int(len(_WORDS) * draw())]
    first, last = _RANGES[int(len(_RANGES) * draw())]
    size = last - first + 1
    return "".join([chr(first + int(size * draw())) for _ in range(1 + int(4 * draw()))])


def _why_not(
    name: EngineName, reference: Engine, folder: Path, *, special: bool, texts: list[str], expected: Tokens
) -> str | None:
    if not installed(name):
        return "not installed"
    try:
        differing = difference(open_engine(name, folder, special=special), reference, texts, expected)
    except Exception as error:  # whatever an engine raises for a tokenizer that it does not know
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None if differing is None else f"gives other ids than tokenizers for {differing[:60]!r}"
