"""Models side by side: figures are those of other measurements, rows do not vanish, tasks of lm-eval run offline."""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from foundation.errors import ConfigError, DataError
from pipeline.evaluation.comparison.candidates import Wanted, check
from pipeline.evaluation.comparison.frontier import frontier
from pipeline.evaluation.comparison.rows import Row, as_csv, as_json, row_of
from pipeline.evaluation.comparison.size_quality import Point, pareto, picture_of, save_svg
from pipeline.evaluation.comparison.table import comparison_tables, small
from pipeline.evaluation.consumers.consumer import CONSUMERS, VLLM_PYTHON
from pipeline.evaluation.heldout import harness
from pipeline.evaluation.heldout.data import HeldOutData
from tests import warm
from tests.evaluation.heldout.small import SEQUENCE, TEXTS, every_third, make_masked, make_tokens
from tests.support import output_of, refusal_of

PROMPT = "The mill at race"


@pytest.fixture(scope="module")
def rows(model: Path, gguf: Path, tokens: Path) -> list[Row]:
    data = HeldOutData(path=str(tokens), sequence_length=SEQUENCE)
    wanted = Wanted(positions=320, batches=(1, 3), prompts=(PROMPT,), sample_tokens=6)
    return frontier({"own": model, "q8": gguf}, data=data, wanted=wanted)


def test_the_first_model_is_the_reference(rows: list[Row]) -> None:
    own, q8 = rows
    assert (own.mean_kl, own.max_kl, own.top1_agreement) == (0.0, 0.0, 1.0)
    assert 0 < q8.mean_kl < q8.max_kl < 0.1  # eight bits
    assert own.positions == q8.positions == 320
    assert (own.consumer, q8.consumer) == ("transformers", "llama.cpp")


def test_two_programs_agree_on_the_loss_of_the_same_tokens(rows: list[Row]) -> None:
    own, q8 = rows
    assert own.tokens == q8.tokens
    assert own.loss_nats == pytest.approx(q8.loss_nats, abs=0.01)  # eight bits
    assert own.bits_per_byte == pytest.approx(q8.bits_per_byte, abs=0.01)
    assert q8.perplexity == pytest.approx(math.exp(q8.loss_nats or 0))


def test_generation_is_timed_at_each_batch_size_and_memory_is_above_the_weights(rows: list[Row]) -> None:
    for row in rows:
        assert [made.batch for made in row.generation] == [1, 3]
        for made in row.generation:
            assert made.prompt_tokens + made.new_tokens <= SEQUENCE
            assert made.tokens_per_second == pytest.approx(made.batch * made.new_tokens / made.seconds)
            assert made.peak_bytes > row.bytes
    assert rows[1].generation[0].peak_bytes < rows[0].generation[0].peak_bytes  # without torch


def test_every_program_continues_a_prompt_by_its_likeliest_tokens(rows: list[Row], model: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415

    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, loaded(ids).logits[:, -1:].argmax(-1)], 1)
    expected = tokenizer.decode(ids[0]).removeprefix(PROMPT)
    assert rows[0].samples == (expected,)
    assert rows[1].samples[0][:4] == expected[:4]  # eight bits may differ later


def test_llama_cpp_generates_a_batch_as_each_sequence_alone(gguf: Path) -> None:
    code = (
        "import json, sys; from pathlib import Path; from pipeline.models.gguf.libllama import Model;"
        "model = Model(Path(sys.argv[1]), threads=1); prompts = [[5, 9, 40, 41], [300, 7, 8, 9], [1, 2, 3, 4]];"
        "print(json.dumps([model.generate(prompts, 5), [model.generate([each], 5)[0] for each in prompts]]))"
    )
    together, alone = json.loads(output_of(warm.run("-c", code, gguf / "model.gguf")).splitlines()[-1])
    assert together == alone
    assert np.shape(together) == (3, 5)


def test_a_missing_program_has_a_row_that_says_so(model: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VLLM_PYTHON, raising=False)
    data = HeldOutData(path=str(tokens), sequence_length=SEQUENCE, max_tokens=64)
    (row,) = frontier({"own": model}, data=data, consumers=["vllm"])
    assert row.consumer == "vllm"
    assert VLLM_PYTHON in str(row.not_run)
    assert row.loss_nats is None
    assert "was not run" in str(comparison_tables([row])[0].caption)
    assert next(iter(csv.DictReader(as_csv([row]).splitlines())))["not_run"] == row.not_run


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"consumers": ["ollama"]}, "no such consumer"),
        ({"wanted": Wanted(batches=(0,))}, "--batches"),
        ({"wanted": Wanted(positions=0)}, "--positions"),
        ({"wanted": Wanted(prompts=("",))}, "--prompt"),
        ({"models": {}}, "nothing to compare"),
    ],
)
def test_bad_input_is_named_before_any_work(fields: dict[str, Any], message: str, model: Path, tokens: Path) -> None:
    data = HeldOutData(path=str(tokens), sequence_length=SEQUENCE)
    with pytest.raises(ConfigError, match=message):
        frontier(**{"models": {"own": model}, "data": data, **fields})
    with pytest.raises(DataError, match="no such directory"):
        frontier({"own": model, "other": Path("nowhere")}, data=data)


def test_a_gguf_file_with_another_tokenizer_is_refused(gguf: Path, tmp_path: Path) -> None:
    other = make_tokens(tmp_path / "tokens", [text.upper() for text in TEXTS])
    with pytest.raises(ConfigError, match=r"model.gguf has another tokenizer: its id \d+ is '.+', not '.+'"):
        check({"q8": gguf}, data=HeldOutData(path=str(other), sequence_length=SEQUENCE))


def test_a_truncated_gguf_file_is_refused(gguf: Path, tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes((gguf / "model.gguf").read_bytes()[:3000])
    with pytest.raises(DataError, match=r"model.gguf is damaged"):
        check({"q8": tmp_path}, data=HeldOutData(path=str(tokens), sequence_length=SEQUENCE))


def test_prompts_need_a_tokenizer(model: Path, tokens: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, tmp_path)
    with pytest.raises(ConfigError, match="has no tokenizer to read a text with"):
        check(
            {"own": tmp_path},
            data=HeldOutData(path=str(tokens), sequence_length=SEQUENCE),
            wanted=Wanted(prompts=(PROMPT,)),
        )


@pytest.mark.integration  # a second measurement
@pytest.mark.sweep
def test_a_loss_mask_holds_for_every_program(model: Path, gguf: Path, tokens: Path, tmp_path: Path) -> None:
    masked = make_masked(tmp_path / "masked", tokens, every_third)
    data = HeldOutData(path=str(masked), sequence_length=SEQUENCE)
    own, q8 = frontier({"own": model, "q8": gguf}, data=data, wanted=Wanted(positions=64, batches=()))
    assert own.tokens == q8.tokens
    assert own.loss_nats == pytest.approx(q8.loss_nats, abs=0.01)
    assert own.bits_per_byte is None
    assert own.generation == ()


@pytest.mark.integration  # two processes for each model
def test_eval_compares_models_and_writes_csv_and_picture(model: Path, gguf: Path, tokens: Path, tmp_path: Path) -> None:
    named = ["--model", f"own={model}", "--model", f"q8={gguf}", "--csv", tmp_path / "a.csv", "--json"]
    more = ["--data", tokens, "--sequence-length", SEQUENCE, "--max-tokens", 320, "--batches", 0]
    found = json.loads(output_of(warm.run("-m", "pipeline", "eval", *named, *more, "--picture", tmp_path / "a.svg")))
    assert [row["name"] for row in found] == ["own", "q8"]
    with (tmp_path / "a.csv").open() as file:
        assert [float(row["loss_nats"]) for row in csv.DictReader(file)] == [row["loss_nats"] for row in found]
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "nothing to evaluate"),
        (["a", "--model", "b=c"], "--model is given, too"),
        (["a"], "give --data TOKENS"),
        (["a", "--data", "b", "--csv", "c.csv"], "--csv.*\n.*side by side"),
        (["--model", "a=b", "--data", "c", "--batches", "x"], "--batches.*\n.*no list"),
        (["--model", "a=b", "--data", "c", "--picture", "no/where.svg"], "no is not a directory"),
        (["--model", "a=b", "--data", "c", "--shots", "5"], "--shots.*\n.*no effect on a loss"),
        (["--model", "a=b", "--tasks", "arc_easy", "--max-tokens", "9"], "--max-tokens.*\n.*no effect on tasks"),
        (["a", "--tasks", "arc_easy", "--prompt", "x"], "--prompt.*\n.*no effect on tasks"),
    ],
)
def test_eval_refuses_by_name(given: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse  # noqa: PLC0415

    from pipeline.evaluation.comparison import command  # noqa: PLC0415

    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(ConfigError, match=re.compile(message)):
        command.run(parser.parse_args(given))


def made(name: str, size: int, kl: float | None, loss: float | None = 3.0) -> Row:
    return Row(name, Path(name), "transformers", "float32", size, 1000, mean_kl=kl, loss_nats=loss)


def test_the_frontier_has_the_points_that_none_is_smaller_and_better_than() -> None:
    points = [
        Point(i, n, b, v) for i, (n, b, v) in enumerate([("a", 9, 1.0), ("b", 5, 2.0), ("c", 6, 3.0), ("d", 2, 4.0)])
    ]
    assert [point.label for point in pareto(points)] == ["d", "b", "a"]
    assert [point.label for point in pareto([*points, Point(4, "e", 2, 0.5)])] == ["e"]


def test_the_picture_is_of_kl_where_it_is_known_and_of_loss_otherwise(tmp_path: Path) -> None:
    with_kl = [made("original", 100, 0.0), made("int8", 50, 1e-4), made("int4", 25, 1e-2)]
    picture = picture_of(with_kl)
    assert [point.label for point in picture.points] == ["int8", "int4"]
    assert picture.logarithmic
    without = [replace(row, mean_kl=None) for row in with_kl]
    assert "loss" in picture_of(without).axis
    assert picture_of(without[:1]) is None
    assert not save_svg(without[:1], tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()
    assert save_svg(with_kl, tmp_path / "a.svg")
    first = (tmp_path / "a.svg").read_bytes()
    save_svg(with_kl, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() == first  # equal rows, equal bytes
    assert all(name in first.decode() for name in ("int8", "int4", "weights on disk"))


def test_a_row_comes_back_from_its_json(rows: list[Row]) -> None:
    assert [row_of(each) for each in json.loads(as_json(rows))] == rows
    infinite = as_json([replace(rows[0], perplexity=math.inf)])
    assert json.loads(infinite)[0]["perplexity"] is None


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.0, "0"), (1.23e-5, "1.2e-05"), (0.0031, "0.0031")])
def test_small_divergences_are_readable(value: float | None, text: str) -> None:
    assert small(value) == text


def test_consumers_are_known_by_the_names_of_the_rows(rows: list[Row]) -> None:
    assert {row.consumer for row in rows} <= set(CONSUMERS)


TASK = """
task: mills
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
metadata:
  version: 1.0
"""


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    """Four questions, of which the model's training text answers every one."""
    asked = [{"question": f"The mill at race {n} turns", "choices": [" zq", " "], "answer": 1} for n in range(3)]
    asked.append({"question": "The mill at", "choices": ["!!", " race"], "answer": 1})
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in asked))
    (tmp_path / "mills.yaml").write_text(TASK.format(file=file))
    return tmp_path


@pytest.mark.integration  # lm_eval takes ten seconds to import
def test_a_local_task_is_evaluated_offline(model: Path, task_folder: Path) -> None:
    pytest.importorskip("sacrebleu", reason="needs lm_eval with what it imports")
    options = ["--tasks", "mills", "--task-folder", task_folder, "--json"]
    said = output_of(warm.run("-m", "pipeline", "eval", "--model", f"own={model}", *options))
    found = json.loads(said)["own"]["mills"]
    assert found["documents"] == 4
    assert found["metrics"]["acc"]["value"] == 1.0
    assert "arc_easy" in refusal_of(warm.run("-m", "pipeline", "eval", model, "--tasks", "arc_eezy"))


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    harness.add_arguments(parser)
    return parser.parse_args(given)


def test_the_library_is_named_where_it_is_missing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"(?s)lm_eval is not installed.*pip install lm_eval"):
        harness.check(arguments("--tasks", "hellaswag"), ["hellaswag"], {"own": model})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--tasks", "a,,b"), "a name is empty"),
        (("--tasks", "a", "--task-folder", "nowhere"), "no such directory"),
        (("--tasks", "a", "--shots", "-1"), "below 0"),
        (("--tasks", "a", "--limit", "0"), "below 1"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(
    given: tuple[str, ...], message: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda _name: True)  # wherever the library is missing
    with pytest.raises(ConfigError, match=message):
        harness.check(arguments(*given), given[1].split(","), {"own": model})
