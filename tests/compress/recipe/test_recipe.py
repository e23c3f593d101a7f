"""`headrace compress run`: every step is done once, what cannot work is refused first, and a killed recipe goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foundation.configfile import merge
from foundation.directory import read_manifest, staging_path
from foundation.errors import ConfigError, DataError
from foundation.section import parse
from pipeline.compress.recipe.check import check_recipe, check_steps, different
from pipeline.compress.recipe.config import RecipeConfig
from pipeline.compress.recipe.steps import plan_steps
from pipeline.models.folder.model_folder import ModelFolder
from tests.conftest import tiny_config, write_config
from tests.evaluation.heldout.small import SEQUENCE, make_model, make_tokens
from tests.support import wait_until
from tests.warm_python import python

STEPS = 60


def make_work(folder: Path, *, steps: int, lr: float = 3e-3, **fields: Any) -> Path:
    """A directory with tokens, a model of two layers, and the training config of a student."""
    tokens = make_tokens(folder / "tokens")
    make_model(folder / "model", tokens, tied=False)
    fields["model"] = {"config": "auto", "path": "set by the recipe"}
    student = tiny_config(tokens, folder / "unused", engine="torch", **fields)
    student["run"] |= {"steps": steps, "checkpoint_every": 10}
    student["optimizer"]["params"]["lr"] = lr
    write_config(folder / "student.json", student)
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_work(tmp_path_factory.mktemp("recipe"), steps=STEPS, lr=1e-3)


def recipe(work: Path, output: str, **fields: Any) -> dict[str, Any]:
    """The fields of a recipe: distilled, then int8 and a GGUF file."""
    made: dict[str, Any] = {
        "model": str(work / "model"),
        "output": str(work / output),
        "data": {"path": str(work / "tokens"), "sequence_length": SEQUENCE},
        "distill": {"config": str(work / "student.json")},
        "quantize": {"int8": {"scheme": "W8A8"}, "q8": {"scheme": "Q8_0"}},
        "consumers": ["transformers"],
    }
    made["quantize"]["q8"]["consumers"] = []
    return merge(made, fields)


def refusal(fields: dict[str, Any]) -> str:
    config = parse(RecipeConfig, fields)

    def check() -> None:
        check_recipe(config)
        check_steps(plan_steps(config))

    with pytest.raises(ConfigError) as caught:
        check()
    assert not Path(config.output).exists()
    return str(caught.value)


def test_a_recipe_without_steps_and_a_name_that_is_taken_are_refused(work: Path) -> None:
    empty = {key: value for key, value in recipe(work, "a").items() if key not in ("distill", "quantize")}
    assert "the recipe has no step" in refusal(empty)
    for name in ("original", "pruned-2", "configs", "a/b", ".hidden"):
        assert "it names a directory" in refusal(recipe(work, "a", quantize={name: {"scheme": "W8A8"}}))


def test_every_later_step_is_checked_before_the_first_and_all_that_is_wrong_is_said_at_once(work: Path) -> None:
    wrong = recipe(work, "a", quantize={"int8": {"scheme": "W8A9"}, "int4": {"scheme": "W4A16", "group_size": 7}})
    wrong["distill"]["overrides"] = ["run.stepz=3"]
    text = refusal(wrong)
    assert "3 things are wrong" in text
    assert f"{work / 'student.json'}: run.stepz" in text
    assert "quantize.int8.scheme = 'W8A9'" in text
    assert "quantize.int4.group_size = 7" in text


def test_a_pruning_that_cannot_be_is_refused_before_the_first_step(work: Path) -> None:
    text = refusal(recipe(work, "a", prune={"target": {"parameters": 1000}}))
    assert "prune.target.parameters" in text


HIDDEN_STATES = 'distill.hidden_states={"loss": "mse"}'
ATTENTIONS = 'distill.attentions={"relation_heads": 3}'


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.sources.0.path=absent", "absent"),
        (HIDDEN_STATES, "the student's hidden_size is 32, the teacher's 64"),
        (ATTENTIONS, "distill.attentions.relation_heads = 3"),
    ],
)
def test_what_a_training_refuses_is_refused_before_the_pruning_with_the_pruned_shape(
    work: Path, override: str, expected: str
) -> None:
    fields = recipe(work, "a", prune={"target": {"shape": {"hidden_size": 32, "num_hidden_layers": 1}}})
    check_steps(plan_steps(parse(RecipeConfig, fields)))
    fields["distill"]["overrides"] = [override]
    with pytest.raises((ConfigError, DataError), match=expected):
        check_steps(plan_steps(parse(RecipeConfig, fields)))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"parameters": 9e5}, {"parameters": 900_000}, "prune.target.parameters = 900000"),
        ({"shape": {"hidden_size": 16}}, {"shape": {"hidden_size": 24}}, "prune.target.shape.hidden_size = 24"),
        ({"bytes": 9e5}, {"bytes": 8e5}, None),
        ({"shape": {"hidden_size": 16}}, {"shape": {"hidden_size": 16, "num_hidden_layers": 1}}, None),
        ({"parameters": 9e5}, {"shape": 3}, None),  # its step says what is wrong with that
    ],
)
def test_a_round_whose_target_a_round_before_has_met_is_refused_before_the_first(
    work: Path, first: dict[str, Any], second: dict[str, Any], expected: str | None
) -> None:
    fields = recipe(work, "rounds", prune=[{"target": first}, {"target": second}])
    if expected is None:
        check_recipe(parse(RecipeConfig, fields))
        return
    with pytest.raises(ConfigError, match=f"{expected}\n  why: round 2 cannot reach it"):
        check_recipe(parse(RecipeConfig, fields))


def test_what_pruning_may_mend_is_left_to_the_step(work: Path) -> None:
    pruned = recipe(work, "a", prune={"target": {"shape": {"intermediate_size": 64}}})
    pruned["quantize"] = {"int4": {"scheme": "W4A16", "group_size": 7}}
    config = parse(RecipeConfig, pruned)
    check_steps(plan_steps(config))


def test_two_rounds_are_pruned_and_distilled_in_turns_and_the_teacher_is_the_original(work: Path) -> None:
    rounds = [
        {"target": {"shape": {name: size}}} for name, size in (("num_hidden_layers", 1), ("intermediate_size", 32))
    ]
    planned = plan_steps(parse(RecipeConfig, recipe(work, "a", prune=rounds)))
    names = ["pruned-1", "distillation-1", "distilled-1", "pruned-2", "distillation-2", "distilled-2", "int8", "q8"]
    assert [step.name for step in planned.steps] == names
    sources = [step.source.name for step in planned.steps]
    assert (
        sources
        == ["model", "pruned-1", "distillation-1", "distilled-1", "pruned-2", "distillation-2"] + ["distilled-2"] * 2
    )
    for number in (1, 4):
        assert planned.steps[number].config["distill"]["teacher"] == str(work / "model")


def test_the_difference_of_configs_is_named_field_by_field() -> None:
    before = {"a": {"b": 1, "c": [1]}, "d": 2}
    assert set(different(before, {"a": {"b": 2, "c": [1]}, "e": 2})) == {"a.b", "d", "e"}


def command(path: Path) -> list[str]:
    return [python(), "-m", "headrace", "compress", "run", "--config", str(path)]


def started(path: Path) -> subprocess.Popen[str]:
    words = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen(command(path), **words)  # type: ignore[call-overload,no-any-return]


def run(path: Path) -> tuple[int, str]:
    process = started(path)
    output, _ = process.communicate(timeout=400)
    return process.returncode, output


def times(work: Path) -> dict[str, int]:
    """Name -> when it was written, of what the steps have made."""
    names = ("distilled", "int8", "q8")
    return {name: (work / "whole" / name / "manifest.json").stat().st_mtime_ns for name in names}


@pytest.mark.integration
def test_a_killed_recipe_goes_on_with_the_step_that_was_interrupted_and_ends_with_all_results(work: Path) -> None:
    path = write_config(work / "recipe.json", recipe(work, "whole"))
    process = started(path)
    journal = work / "whole/runs/distillation/metrics.jsonl"
    checkpoints = work / "whole/runs/distillation/checkpoints"
    wait_until(lambda: any(checkpoints.glob("step-*")), process=process, said=lambda: process.communicate()[0])
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (work / "whole/distilled").exists()
    code, output = run(path)
    assert code == 0, output
    assert "resum" in output
    journaled = [json.loads(line) for line in journal.read_text().splitlines()]
    assert max(row["step"] for row in journaled if row["kind"] == "step") == STEPS
    made = read_manifest(work / "whole/int8", kind="model")
    assert made.parents["model"]["fingerprint"] == read_manifest(work / "whole/distilled", kind="model").fingerprint
    rows = {row["name"]: row for row in json.loads((work / "whole/frontier.json").read_text())}
    assert set(rows) == {"distilled", "int8", "q8", "original"}
    assert 0 < rows["int8"]["mean_kl"] < 0.05
    assert (work / "whole/frontier.svg").is_file()
    assert "Lineage" in (work / "whole/report.html").read_text()
    before = times(work)
    code, output = run(path)  # nothing is left to do but to look at the results
    assert (code, output.count("done before")) == (0, 4), output
    assert times(work) == before
    changed = write_config(work / "changed.json", recipe(work, "whole", quantize={"int8": {"dtype": "bfloat16"}}))
    code, output = run(changed)
    assert code == 2
    assert "it was done with another config (dtype)" in output
    assert times(work) == before
    make_model(work / "model", work / "tokens", tied=False, steps=1)
    code, output = run(path)
    assert code == 2
    assert f"it was made from another {work / 'model'}" in output
    assert f"remove {work / 'whole/distilled'} and {work / 'whole/runs/distillation'}" in output
    assert times(work) == before


MADE = ("pruned-1", "distilled-1", "pruned-2", "distilled-2")
ROUNDS = [
    {"target": {"shape": {"num_hidden_layers": 1}}, "calibration": {"samples": 8}},
    {"target": {"shape": {"intermediate_size": 32}}, "calibration": {"samples": 8}},
]


def write_recipe(work: Path, output: str) -> Path:
    fields: dict[str, Any] = {
        "model": str(work / "model"),
        "output": str(work / output),
        "data": {"path": str(work / "tokens"), "sequence_length": SEQUENCE},
        "prune": [{**each, "consumers": []} for each in ROUNDS],
        "distill": {"config": str(work / "student.json")},
    }
    return write_config(work / f"{output}.json", fields)


def kill_when(path: Path, reached: Callable[[], bool]) -> None:
    process = started(path)
    wait_until(reached, process=process, said=lambda: process.communicate()[0])
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def written(output: Path) -> dict[str, int]:
    """Name -> when its manifest was written, of the models that are whole."""
    return {name: (output / name / "manifest.json").stat().st_mtime_ns for name in MADE if (output / name).exists()}


@pytest.fixture(scope="module")
def rounds_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_work(tmp_path_factory.mktemp("rounds"), steps=40, zero_optimization={"stage": 0})


@pytest.mark.sweep  # in CI: the recipe of one round above
def test_two_rounds_killed_between_and_within_go_on_where_they_were_and_make_nothing_twice(rounds_work: Path) -> None:
    """All processes are killed while the second pruning writes, and while the second distillation trains."""
    path, output = write_recipe(rounds_work, "killed"), rounds_work / "killed"
    kill_when(path, lambda: staging_path(output / "pruned-2").exists() or (output / "pruned-2").exists())
    before = written(output)
    assert {"pruned-1", "distilled-1"} <= before.keys()
    steps = output / "runs/distillation-2/checkpoints"
    kill_when(path, lambda: steps.is_dir() and any(steps.glob("step-*")))
    assert before.items() <= written(output).items()  # nothing was made again
    assert not (output / "distilled-2").exists()
    code, text = run(path)
    assert code == 0, text
    assert text.count("done before") == 4, text  # pruned-1, distillation-1, distilled-1, pruned-2
    assert before.items() <= written(output).items()
    _check_lineage(rounds_work, output)


def _check_lineage(work: Path, output: Path) -> None:
    """Each step is made of the one before, and every teacher is the original."""
    sizes = [ModelFolder.open(output / name).parameters for name in MADE]
    assert sizes[0] == sizes[1] > sizes[2] == sizes[3]
    first, second = (read_manifest(output / name, kind="model") for name in ("pruned-1", "pruned-2"))
    assert first.parents["model"]["path"] == str(work / "model")
    assert second.parents["model"]["fingerprint"] == read_manifest(output / "distilled-1", kind="model").fingerprint
    for number in (1, 2):
        config = json.loads((output / f"configs/distillation-{number}.json").read_text())
        assert config["distill"]["teacher"] == str(work / "model")
    lineage = json.dumps(read_manifest(output / "distilled-2", kind="model").details)
    assert lineage.count("pruning") >= 2
