"""What the mutation sweep puts into the code: 200 faults that compute something else, the same ones for a seed."""

from __future__ import annotations

import ast

import pytest

from tests.sweeps.mutants import EQUIVALENT, SUBJECTS, all_mutants, drawn, mutants_of
from tests.sweeps.mutations import folder_of
from tests.sweeps.sweep import ROOT

FUNCTION = '''
def lr(step: int = 3) -> float:
    """Doubles 2 < 3."""
    assert step > 1
    log.info("step %d", step + 1)
    if step < 0:
        raise ValueError(f"{step + 1}", step - 1)
    rate: Literal[2] = divide(step, peak)
    self.count += 1
    return rate
'''


def test_200_mutants_of_a_seed_change_the_code_and_have_tests() -> None:
    found = drawn()
    assert {subject: len(mutants) for subject, mutants in found.items()} == {
        subject: count for subject, (count, _) in SUBJECTS.items()
    }
    mutants = [each for several in found.values() for each in several]
    assert len({each.name for each in mutants}) == 200
    texts = {mutant.file: (ROOT / mutant.file).read_text() for mutant in mutants}
    trees = {file: ast.dump(ast.parse(text)) for file, text in texts.items()}
    for mutant in mutants:
        assert ast.dump(ast.parse(mutant.applied(texts[mutant.file]))) != trees[mutant.file], mutant.name
        assert folder_of(mutant) != "tests", mutant.name


def test_another_seed_draws_others() -> None:
    names = [{each.name for found in drawn(seed=seed).values() for each in found} for seed in (0, 0, 1)]
    assert names[0] == names[1]
    assert len(names[0] & names[2]) < 60


def test_mutants_that_are_equivalent_to_the_code_still_exist() -> None:
    assert EQUIVALENT.keys() <= {each.name for found in all_mutants().values() for each in found}


def test_messages_assertions_and_annotations_are_left_alone() -> None:
    names = [mutant.name.partition(" [")[0] for mutant in mutants_of(FUNCTION, "lr.py")]
    assert names == [
        "lr: < -> <= in step < 0",
        "lr: 0 -> 1 in step < 0",
        "lr: swap step and peak in divide(step, peak)",
        "lr: leave out self.count += 1",
        "lr: 1 -> 2 in self.count += 1",
    ]


@pytest.mark.parametrize(
    "moved", ["import math\n\n\n" + FUNCTION, FUNCTION.replace("    assert step > 1\n", "    first = next(steps)\n")]
)
def test_a_mutant_keeps_its_name_where_its_function_moves(moved: str) -> None:
    assert [each.name for each in mutants_of(moved, "b.py")] == [each.name for each in mutants_of(FUNCTION, "a.py")]
