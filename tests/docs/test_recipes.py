"""Figures on the page of recipes are those that `headrace plan` computes."""

from __future__ import annotations

import re

import pytest

from pipeline.plan.laws.laws import chinchilla_loss
from pipeline.plan.predict.planned_run import open_run
from pipeline.plan.show import as_json, report_of
from pipeline.runtime.machines.known import load_machine
from tests.conftest import ROOT

PAGE = (ROOT / "docs/how-to/recipes.md").read_text()
RECIPES = re.findall(r"`--config (\S+) --machine (\S+) --nodes (\d+)` \| (.*) \|$", PAGE, flags=re.MULTILINE)
CURVES = re.findall(r"^\| ([\d.]+e9) \| ([\d.,]+e9) \| (.*) \|$", PAGE, flags=re.MULTILINE)


def numbers(cells: str) -> list[float]:
    return [float(cell.replace(",", "")) for cell in cells.split(" | ")]


@pytest.mark.parametrize(("config", "machine", "nodes", "cells"), RECIPES)
def test_a_recipe_takes_what_its_plan_says(config: str, machine: str, nodes: str, cells: str) -> None:
    planned = as_json(report_of(open_run(str(ROOT / config), [], load_machine(machine), nodes=int(nodes)), price=2.5))
    found = [planned["tokens"], *(planned[key]["typical"] for key in ("days", "gpu_hours", "money"))]
    assert numbers(cells) == pytest.approx(found, rel=0.1)  # a third of the plan's own interval
    assert planned["memory"]["fits"]


def test_the_curves_are_those_of_the_law() -> None:
    assert (len(RECIPES), len(CURVES)) == (5, 3)
    for size, tokens, cells in CURVES:
        parameters, whole = numbers(f"{size} | {tokens}")
        losses = [chinchilla_loss(parameters, whole * share) for share in (0.1, 0.5, 1)]
        assert numbers(cells) == pytest.approx(losses, abs=0.003)
