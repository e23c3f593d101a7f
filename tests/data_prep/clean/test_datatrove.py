"""Comparison with datatrove: its filters through the adapter, and our rules' decisions with its own.

Documents are the docstrings of Python's library: prose, lists, tables and code, some repetitive.
"""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from data_prep.clean.chain import CleanedText, Dropped, build_chain
from data_prep.config.cleaning import parse_steps
from foundation.errors import ConfigError
from tests.data_prep.clean.one_step import PROSE, run

needs_datatrove = pytest.mark.skipif(
    find_spec("datatrove") is None or find_spec("spacy") is None,
    reason="needs datatrove and spaCy: pip install datatrove spacy",
)

REASONS = {
    "dup_para_frac": "duplicate paragraphs",
    "dup_para_char_frac": "characters in duplicate paragraphs",
    "dup_line_frac": "duplicate lines",
    "dup_line_char_frac": "characters in duplicate lines",
    **{f"top_{n}_gram": f"top {n}-gram" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"duplicate {n}-grams" for n in range(5, 11)},
    "gopher_short_doc": "too few words",
    "gopher_long_doc": "too many words",
    "gopher_below_avg_threshold": "words too short",
    "gopher_above_avg_threshold": "words too long",
    "gopher_too_many_hashes": "too many hashes",
    "gopher_too_many_ellipsis": "too many ellipses",
    "gopher_too_many_bullets": "too many bullets",
    "gopher_too_many_end_ellipsis": "too many lines end in an ellipsis",
    "gopher_below_alpha_threshold": "too few words with letters",
    "gopher_enough_stop_words": "too few stop words",
    "line_punct_ratio": "few lines end a sentence",
    "short_line_ratio": "many short lines",
    "char_dup_ratio": "characters in duplicate lines",
    "list_ratio": "many line feeds",
    "lorem_ipsum": "lorem ipsum",
    "curly_bracket": "curly bracket",
    "too_few_sentences": "too few sentences",
}
"""Our drop reasons by datatrove's."""


@pytest.fixture(scope="module")
def documents() -> list[str]:
    """600 docstrings of at least 300 characters."""
    library = Path(ast.__file__).parent
    found: list[str] = []
    for path in sorted([*library.glob("*.py"), *library.glob("*/*.py")]):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        defined = [n for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
        found += [text for node in defined if len(text := ast.get_docstring(node) or "") >= 300]
        if len(found) >= 600:
            break
    return found[:600]


def decisions(step: str, documents: list[str], **keys: Any) -> list[str]:
    """For each document, "kept" or the reason for the drop."""
    here = build_chain(parse_steps([{"step": step, **keys}]))
    outcomes = [here.clean(text, {}) for text in documents]
    return ["kept" if isinstance(outcome, CleanedText) else outcome.reason for outcome in outcomes]


@needs_datatrove
@pytest.mark.integration
@pytest.mark.parametrize(
    ("step", "name"),
    [
        ("gopher_repetition", "GopherRepetitionFilter"),
        ("gopher_quality", "GopherQualityFilter"),
        ("fineweb_quality", "FineWebQualityFilter"),
    ],
)
def test_with_spacys_words_the_decisions_are_those_of_datatrove(step: str, name: str, documents: list[str]) -> None:
    ours = decisions(step, documents, words="spacy")
    theirs = decisions("datatrove", documents, filter=name)
    theirs = [REASONS.get(reason, reason) for reason in theirs]
    assert [a == "kept" for a in ours] == [b == "kept" for b in theirs]
    # punctuation is defined by Unicode here and by a list there, so mean word lengths may differ
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 0.99 * len(documents)


@needs_datatrove
@pytest.mark.parametrize(
    ("step", "name", "least"), [("fineweb_quality", "FineWebQualityFilter", 0.98), ("c4", "C4QualityFilter", 0.98)]
)
def test_with_our_words_most_decisions_are_the_same(step: str, name: str, least: float, documents: list[str]) -> None:
    ours = decisions(step, documents)
    theirs = [REASONS.get(reason, reason) for reason in decisions("datatrove", documents, filter=name)]
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= least * len(documents)


@needs_datatrove
def test_a_datatrove_filter_can_be_used_by_its_name() -> None:
    pattern = {"regex_exp": "headrace"}
    here = build_chain(parse_steps([{"step": "datatrove", "filter": "RegexFilter", "args": pattern}]))
    assert isinstance(here.clean("no such word", {}), CleanedText)
    assert here.clean(PROSE, {}) == Dropped("datatrove.RegexFilter", "filtered")


@needs_datatrove
def test_a_filter_may_change_the_text() -> None:
    here = build_chain(parse_steps([{"step": "datatrove", "filter": "C4QualityFilter"}]))
    assert here.clean(PROSE + "menu\n", {}) == CleanedText(PROSE.strip())
    assert here.edits == {"datatrove.C4QualityFilter": 1}


@needs_datatrove
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"filter": "GopherQualtyFilter"}, r"clean\.0\.filter.*\n.*no such filter\n.*'GopherQualityFilter'"),
        ({"filter": "SamplerFilter"}, "draws at random"),
        ({"filter": "C4BadWordsFilter", "args": {"keep_fraction": 0.1}}, "draws at random"),
        ({"filter": "LambdaFilter"}, "a config cannot hold"),
        ({"filter": "GopherQualityFilter", "args": {"min_words": 3}}, r"clean\.0\.args.*\n.*TypeError.*min_words"),
    ],
)
def test_unsupported_filters_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run("datatrove", "text", **keys)


@pytest.mark.parametrize(
    ("step", "keys", "module"),
    [
        ("datatrove", {"filter": "GopherQualityFilter"}, "datatrove"),
        ("gopher_quality", {"words": "spacy"}, "spacy"),
        ("language", {"keep": ["en"]}, "pycld2"),
        ("unicode", {}, "ftfy"),
    ],
)
def test_a_missing_library_is_named_when_the_chain_is_built(
    monkeypatch: pytest.MonkeyPatch, step: str, keys: dict[str, Any], module: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"clean\.0.*\n.*needs the package '{module}'.*\n.*pip install {module}"):
        run(step, "text", **keys)
