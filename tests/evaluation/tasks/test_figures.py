"""Figures of tasks against values that were computed by hand, and intervals against published ones."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from foundation.task_figures import figures_line
from pipeline.config.sections.evaluation import TaskSection
from pipeline.evaluation.tasks.encode import EncodedTask
from pipeline.evaluation.tasks.figures import MATCHES, continuations, ranked_figures, wilson
from pipeline.evaluation.tasks.passes import PassShape, forward_passes, positions
from pipeline.evaluation.tasks.rows import RankedQuestion


def ranked(*questions: RankedQuestion, targets: list[int], truncated: int = 0) -> EncodedTask:
    ids = tuple(np.zeros(5, dtype=np.int64) for _ in targets)
    return EncodedTask(TaskSection(name="t"), questions, ids, np.array(targets), truncated, None)


def test_each_normalization_ranks_by_its_own_length() -> None:
    # the first is likeliest; per character (2, 8 and 4 of them) the second; per token (1, 2 and 4) the third
    question = RankedQuestion((("c", " ab"), ("c", " abcdefgh"), ("c", " abcd")), 0)
    nats = np.array([2.0, 3.2, 4.0])
    for answer, (plain, character, token) in enumerate([(1, 0, 0), (0, 1, 0), (0, 0, 1)]):
        one = RankedQuestion(question.choices, answer)
        found = ranked_figures(ranked(one, targets=[1, 2, 4]), nats)
        names = ("accuracy", "accuracy_per_character", "accuracy_per_token")
        assert [found[name] for name in names] == [plain, character, token]
        assert found["bits_per_byte"] == pytest.approx(nats[answer] / math.log(2) / len(question.choices[answer][1]))


def test_one_choice_has_bits_per_byte_alone() -> None:
    questions = [RankedQuestion((("c", text),), 0) for text in (" é", " ab")]  # 3 bytes each
    found = ranked_figures(ranked(*questions, targets=[1, 1], truncated=1), np.array([3.0, 6.0]) * math.log(2))
    assert found["bits_per_byte"] == pytest.approx(1.5)
    half = 1.959964 * np.std([1.0, 2.0], ddof=1) / math.sqrt(2)
    assert found["bits_per_byte_low"] == pytest.approx(1.5 - half, rel=1e-5)
    assert "accuracy" not in found
    assert figures_line(found) == "bits per byte 1.5000 [0.5200, 2.4800] (2 samples, 1 truncated)"


def test_the_interval_of_a_share_is_wilsons() -> None:
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3
    for (successes, trials), interval in {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605)}.items():
        assert wilson(successes, trials) == pytest.approx(interval, abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(29, 29) == pytest.approx((0.8830, 1.0), abs=5e-5)


@pytest.mark.parametrize(
    ("rule", "text", "answer", "right"),
    [
        ("exact", " 4 ", "4", True),
        ("exact", "44", "4", False),
        ("contains", "it is 4.", "4", True),
        ("contains", "it is 5.", "4", False),
        ("number", "3 + 1,000 = 1,003.", "1003", True),
        ("number", "-2 or 2.50", " 2.5", True),
        ("number", "2 or 3", "2", False),
        ("number", "none", "2", False),
        ("number", "2", "two", False),
    ],
)
def test_match_rules(rule: str, text: str, answer: str, right: bool) -> None:
    assert MATCHES[rule](text, answer) is right


def test_a_continuation_ends_at_the_first_stop_or_end() -> None:
    class Letters:
        """Ids are letters; 0 ends a text."""

        eos_token_id = 0

        def decode(self, ids: list[int]) -> str:
            return "".join(chr(96 + each) for each in ids)

    section = TaskSection(name="t", stop=("c", "de"))
    task: Any = EncodedTask(section, (), (), np.zeros(0, dtype=np.int64), 0, Letters())
    assert continuations(task, np.array([[1, 2, 3, 4], [1, 0, 1, 1], [4, 5, 1, 1], [1, 1, 1, 1]])) == [
        "ab",
        "a",
        "",
        "aaaa",
    ]


@pytest.mark.parametrize(
    "shape", [PassShape(3, 2, 64, multiple=12), PassShape(1, 2, 64), PassShape(2, 2, 64, fixed=True)]
)
def test_every_request_is_in_one_pass_that_is_no_larger_than_a_micro_batch(shape: PassShape) -> None:
    lengths = np.random.default_rng(0).integers(1, 65, size=101)
    passes = forward_passes(lengths, shape)
    assert sorted(np.concatenate([own for each in passes for own in each.requests])) == list(range(101))
    for each in passes:
        assert each.rows * each.length <= 2 * 64
        assert each.length % shape.multiple == 0 or each.length == 64
        assert all(len(own) <= each.rows and lengths[own].max(initial=0) <= each.length for own in each.requests)
        assert not shape.fixed or (each.rows, each.length) == (2, 64)
    assert [each.length for each in passes] == sorted((each.length for each in passes), reverse=True)
    if not shape.fixed:
        assert positions(passes) < 1.5 * lengths.sum()


def test_the_rules_of_gsm8k_are_the_filters_and_the_metric_of_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    # its module of metrics imports them; exact_match uses neither
    for name in ("sacrebleu", "evaluate"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name, ModuleType(name)))
    regex = import_module("lm_eval.filters.extraction").RegexFilter
    exact = import_module("lm_eval.api.metrics").exact_match_hf_evaluate
    ignored = {"regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"], "ignore_case": True}
    filters = {
        "gsm8k_strict": regex(r"#### (\-?[0-9\.\,]+)"),
        "gsm8k_flexible": regex(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", group_select=-1),
    }
    answers = ["She has 48/2 = <<48/2=24>>24.\n#### 72", "#### 1,080", "-3", "0.5"]
    texts = [
        " He sold 72.",
        "48 + 24\n#### 72",
        "#### 72.",
        "$1,080 in all",
        "#### $72",
        "#### -3",
        "- 3",
        "-3",
        "is 7",
    ]
    texts += [
        "",
        "no number",
        "72 eggs",
        "so 72, not 71",
        "#### 1080.00",
        "0.5",
        ".5",
        "#### 72\n#### 71",
        "...",
        "###72",
    ]
    agreed = 0
    for name, theirs in filters.items():
        for answer in answers:
            (chosen,) = theirs.apply([texts], [{}])
            for text, one in zip(texts, chosen, strict=True):
                wanted = bool(exact(predictions=[one], references=[answer], **ignored)["exact_match"])
                assert MATCHES[name](text, answer) == wanted, (name, text, answer)
                agreed += wanted
    assert agreed > len(answers)
