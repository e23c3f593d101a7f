"""Speed and decisions of the cleaning chain compared with datatrove's, on the same documents, in one process.

    python -m benchmarks.cleaning CORPUS.jsonl [--documents 2000] [--words punctuation,spacy,whitespace] [--json OUT]

The chain: mojibake repair, Gopher repetition, Gopher quality, C4, FineWeb quality, masking of addresses, each with its
defaults; a text that one step drops does not reach the next. For every definition of a word it prints CPU time as MB/s
of UTF-8 text for the whole chain and for each step alone on all documents, the ratio, and the rate of equal decisions.

datatrove's words are spaCy's; with "whitespace" datatrove splits at white space, too, so that its decisions are
comparable; that is not its default. Language identification is left out: datatrove's needs a model from the internet.

Needs `pip install datatrove spacy ftfy`, and a corpus with the text in "text".
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from data_prep.clean.chain import Chain, Kept, build_chain
from data_prep.config.cleaning import parse_steps

STEPS = ("unicode", "gopher_repetition", "gopher_quality", "c4", "fineweb_quality", "pii")
WITH_WORDS = ("gopher_repetition", "gopher_quality", "fineweb_quality")
LONGEST = 200_000
"""Characters: longer documents are left out, since spaCy takes minutes for some."""

Decision = tuple[bool, str]
"""(True, cleaned text), or (False, step that dropped it)."""
Cleaner = Callable[[str], Decision]


@dataclass
class Comparison:
    """Runs two cleaners on the same texts."""

    ours: Cleaner
    theirs: Cleaner

    def run(self, texts: Sequence[str], rounds: int) -> dict[str, Any]:
        """MB/s of CPU time of each, the median ratio over `rounds` parts of the texts, and the agreement."""
        size = -(-len(texts) // rounds)
        times, decisions = [], []
        for start in range(0, len(texts), size):
            part = texts[start : start + size]
            ours, our_decisions = _timed(self.ours, part)
            theirs, their_decisions = _timed(self.theirs, part)
            times.append((ours, theirs))
            decisions += list(zip(our_decisions, their_decisions, strict=True))
        megabytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) / 1e6
        differ = Counter(_difference(a, b) for a, b in decisions if a[0] != b[0])
        return {
            "ours_mb_s": megabytes / sum(ours for ours, _ in times),
            "theirs_mb_s": megabytes / sum(theirs for _, theirs in times),
            "ratio": statistics.median(theirs / ours for ours, theirs in times),
            "kept": sum(a[0] for a, _ in decisions) / len(decisions),
            "same_decision": sum(a[0] == b[0] for a, b in decisions) / len(decisions),
            "same_text": statistics.fmean([a[1] == b[1] for a, b in decisions if a[0] and b[0]] or [1]),
            "differ": dict(differ.most_common(5)),
        }


def our_cleaner(steps: Sequence[str], words: str) -> Cleaner:
    """This project's chain of these steps."""
    raw: list[dict[str, Any]] = [{"step": step} | ({"words": words} if step in WITH_WORDS else {}) for step in steps]
    raw = [r | ({"normalization": None} if r["step"] == "unicode" else {}) for r in raw]
    chain: Chain = build_chain(parse_steps(raw))

    def clean(text: str) -> Decision:
        outcome = chain.clean(text, {})
        return (True, outcome.text) if isinstance(outcome, Kept) else (False, f"{outcome.step}: {outcome.reason}")

    return clean


def their_cleaner(steps: Sequence[str]) -> Cleaner:
    """datatrove's filters and formatters for the same steps."""
    document_class = import_module("datatrove.data").Document
    filters, formatters = import_module("datatrove.pipeline.filters"), import_module("datatrove.pipeline.formatters")
    rule_classes: dict[str, Any] = {
        "unicode": formatters.FTFYFormatter,
        "gopher_repetition": filters.GopherRepetitionFilter,
        "gopher_quality": filters.GopherQualityFilter,
        "c4": filters.C4QualityFilter,
        "fineweb_quality": filters.FineWebQualityFilter,
        "pii": formatters.PIIFormatter,
    }
    rules = [(step, rule_classes[step]()) for step in steps]

    def clean(text: str) -> Decision:
        document = document_class(text=text, id="")
        for step, rule in rules:
            if hasattr(rule, "format"):
                document.text = rule.format(document.text)
                continue
            try:
                result = rule.filter(document)
            except ZeroDivisionError:  # a text without words or lines
                return False, f"{step}: ZeroDivisionError"
            if result is not True:
                return False, f"{step}: {result[1] if isinstance(result, tuple) else result}"
        return True, document.text

    return clean


def split_words_at_white_space() -> Callable[[], None]:
    """Makes datatrove split words at white space, with unchanged sentences; returns a function that undoes it."""
    word_tokenizers: Any = import_module("datatrove.utils.word_tokenizers")
    load = word_tokenizers.load_word_tokenizer
    spacy = load("en")

    class WhiteSpace:
        span_tokenize = staticmethod(spacy.span_tokenize)
        word_tokenize = staticmethod(str.split)

    word_tokenizers.load_word_tokenizer = lambda _: WhiteSpace()
    return lambda: setattr(word_tokenizers, "load_word_tokenizer", load)


def _clear_word_cache() -> None:
    import_module("datatrove.utils.text").split_into_parts.cache_clear()


def _timed(clean: Cleaner, texts: Sequence[str]) -> tuple[float, list[Decision]]:
    start = time.process_time()
    decisions = [clean(text) for text in texts]
    return time.process_time() - start, decisions


def _difference(ours: Decision, theirs: Decision) -> str:
    return f"{'kept' if ours[0] else ours[1]} | {'kept' if theirs[0] else theirs[1]}"


def _read(path: Path, count: int) -> list[str]:
    texts: list[str] = []
    with path.open("rb") as lines:
        for line in lines:
            text = orjson.loads(line)["text"]
            if text and len(text) <= LONGEST:
                texts.append(text)
            if len(texts) == count:
                break
    return texts


def main() -> None:
    """Runs all comparisons and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--words", default="punctuation,spacy,whitespace")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # datatrove computes the mean of an empty list
    texts = _read(given.corpus, given.documents)
    print(f"{len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} million characters; CPU time, one process")
    rows = [row for words in given.words.split(",") for row in _compare(words, texts, given.rounds)]
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


def _compare(words: str, texts: list[str], rounds: int) -> list[dict[str, Any]]:
    undo = split_words_at_white_space() if words == "whitespace" else lambda: None
    rows = []
    for steps in (STEPS, *((step,) for step in STEPS)):
        _clear_word_cache()
        comparison = Comparison(our_cleaner(steps, words), their_cleaner(steps))
        comparison.run(texts[:20], 1)  # loads and compiles
        row = {"words": words, "steps": "+".join(steps) if len(steps) == 1 else "chain"} | comparison.run(texts, rounds)
        rows.append(row)
        print(_line(row), flush=True)
    undo()
    return rows


def _line(row: dict[str, Any]) -> str:
    speeds = f"headrace {row['ours_mb_s']:6.1f} MB/s  datatrove {row['theirs_mb_s']:6.2f}  ratio {row['ratio']:5.1f}"
    same = f"kept {row['kept']:.3f}  same decision {row['same_decision']:.4f}  same text {row['same_text']:.4f}"
    return f"{row['words']:12} {row['steps']:18} {speeds}  {same}  {row['differ'] or ''}"


if __name__ == "__main__":
    main()
