"""Tasks of lm-evaluation-harness: offline, with a task and a data set in files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from pipeline.evaluation.heldout import harness
from tests import warm
from tests.support import output_of, refusal_of

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
