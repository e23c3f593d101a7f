"""Choice of the tokenization engine: the fastest one that reproduces the ids of the reference.

The reference is the `tokenizers` library with tokenizer.json, which all other software loads. For a tokenizer given as
a sentencepiece model, the reference is `sentencepiece` itself. Other engines may replace it only if the model has no
known feature that tokenizer.json cannot express, see `sentencepiece_model.inexact_because`.

An engine is verified once when the tokenizer is made, on adversarial texts and a sample of the corpus, and again in
every map task, on a sample of its documents. If the first check fails, the next candidate replaces the engine. If the
second fails, the job ends, since earlier documents may have wrong ids, too.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from data_prep.tokenizer.adversarial_texts import ADVERSARIAL_TEXTS, normal_forms, random_texts
from data_prep.tokenizer.engines import (
    CANDIDATES,
    EngineName,
    TokenizerEngine,
    Tokens,
    find_mismatch,
    installed,
    open_engine,
)
from data_prep.tokenizer.load import reference_of
from foundation.errors import ConfigError, DataError


@dataclass(frozen=True)
class ChosenEngine:
    """The tokenization engine of a job.

    Attributes:
        engine: name of the engine.
        rejected: (name, reason) of each faster candidate that was rejected.
    """

    engine: EngineName
    rejected: tuple[tuple[str, str], ...]


def choose_engine(wanted: str, folder: Path, *, parse_special_tokens: bool, sample: list[str]) -> ChosenEngine:
    """Chooses the engine for a tokenizer.

    Args:
        wanted: an engine's name, or "auto".
        folder: folder of the tokenizer.
        parse_special_tokens: whether a literal special token in a text becomes that token.
        sample: texts of the corpus.

    Raises:
        ConfigError: the named engine is not installed, or gives other ids than the reference.
    """
    reference_name = reference_of(folder)
    if wanted == "sentencepiece" != reference_name:
        why, remedy = "the ids of this tokenizer are those of its tokenizer.json", 'set it to "auto" or "tokenizers"'
        raise ConfigError("tokenizer.engine", wanted, why=why, remedy=remedy)
    candidates: tuple[EngineName, ...] = CANDIDATES if reference_name == "tokenizers" else (*CANDIDATES, "tokenizers")
    names = candidates if wanted == "auto" else tuple(name for name in candidates if name == wanted)
    rejected: list[tuple[str, str]] = []
    more, reason = _of_sentencepiece(folder) if reference_name == "sentencepiece" else ([], None)
    if reason is not None:
        rejected += [(name, reason) for name in names]
        names = ()
    with ThreadPoolExecutor(1) as pool:  # loading takes 0.3 s and 0.2 s, and neither holds the GIL
        for name in names[:1]:
            pool.submit(open_engine, name, folder, parse_special_tokens=parse_special_tokens)
        reference = open_engine(reference_name, folder, parse_special_tokens=parse_special_tokens)
        texts = [*ADVERSARIAL_TEXTS, *normal_forms(), *random_texts(), *more, *sample] if names else []
        expected = reference.encode(texts)
    for name in names:
        reason = _rejection(
            name, reference, folder, parse_special_tokens=parse_special_tokens, texts=texts, expected=expected
        )
        if reason is None:
            return ChosenEngine(name, tuple(rejected))
        rejected.append((name, reason))
    if wanted not in ("auto", reference_name):
        remedy = f'set it to "auto" or "{reference_name}"'
        raise ConfigError("tokenizer.engine", wanted, why=rejected[0][1], remedy=remedy)
    return ChosenEngine(reference_name, tuple(rejected))


def _of_sentencepiece(folder: Path) -> tuple[list[str], str | None]:
    """Texts for the comparison, and the reason why no engine that reads tokenizer.json can be exact, or None."""
    from data_prep.tokenizer import sentencepiece_model  # noqa: PLC0415 - few jobs need it

    model = sentencepiece_model.reference_model(folder)
    return sentencepiece_model.texts_of_pieces(model), sentencepiece_model.inexact_because(model)


def check_sample(
    engine: TokenizerEngine, folder: Path, texts: list[str], *, parse_special_tokens: bool, where: str
) -> None:
    """Compares an engine with the reference on some texts.

    Args:
        where: name of the task that checks, for the error message, e.g. `map task 3`.

    Raises:
        DataError: their ids differ; the message names a text.
    """
    name = reference_of(folder)
    if engine.name == name or not texts:
        return
    reference = open_engine(name, folder, parse_special_tokens=parse_special_tokens)
    mismatch = find_mismatch(engine, reference, texts, reference.encode(texts))
    if mismatch is not None:
        why = f"{where}: {engine.name} and {name} give different ids for {mismatch[:80]!r}"
        raise DataError(f'{why}\n  try: "tokenizer": {{"engine": "{name}"}}, and remove the job directory')


def _rejection(
    name: EngineName,
    reference: TokenizerEngine,
    folder: Path,
    *,
    parse_special_tokens: bool,
    texts: list[str],
    expected: Tokens,
) -> str | None:
    if not installed(name):
        return "not installed"
    try:
        mismatch = find_mismatch(
            open_engine(name, folder, parse_special_tokens=parse_special_tokens), reference, texts, expected
        )
    except Exception as error:  # engines raise any type for an unsupported tokenizer
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None if mismatch is None else f"gives other ids than {reference.name} for {mismatch[:60]!r}"
