"""The demo's files agree with one another, and keep out of training what its figures are measured on."""

from __future__ import annotations

import json

import pytest

from data_prep.hashing import HELDOUT, content_hashes, select_fraction
from foundation.section import parse
from pipeline.compress.recipe.config import RecipeConfig
from pipeline.compress.recipe.steps import plan_steps
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from tests.conftest import ROOT
from tests.demo.heldout import documents

DEMO = ROOT / "demo"


def test_the_documents_that_models_are_scored_on_are_held_out() -> None:
    config = json.loads((DEMO / "corpus.json").read_text())
    hashes = content_hashes([document["text"] for document in documents()])[:, 0]
    assert len(hashes) == 50
    assert select_fraction(hashes, fraction=config["heldout_fraction"], seed=config["seed"], purpose=HELDOUT).all()
    # these would change the text before it is hashed
    assert not {"clean", "dedup"} & set(config)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["teacher", "student"])
def test_the_batch_divides_among_the_gpus_that_run_sh_takes(name: str, gpus: int) -> None:
    run = resolve(load_config(DEMO / f"{name}.json"), world_size=gpus)
    assert run.batch.samples % gpus == 0


def test_every_model_is_measured_on_windows_of_the_length_it_was_trained_on() -> None:
    length = load_config(DEMO / "teacher.json").data.sequence_length
    assert load_config(DEMO / "student.json").data.sequence_length == length
    assert json.loads((DEMO / "compress.json").read_text())["data"]["sequence_length"] == length


def test_the_recipe_trains_what_the_student_config_says_in_the_places_that_it_names() -> None:
    recipe, student = (json.loads((DEMO / f"{name}.json").read_text()) for name in ("compress", "student"))
    steps = {step.name: step for step in plan_steps(parse(RecipeConfig, recipe)).steps}
    training = steps["distillation"].config
    for section, key in (("model", "path"), ("distill", "teacher"), ("run", "dir")):
        assert training[section][key] == student[section][key]
