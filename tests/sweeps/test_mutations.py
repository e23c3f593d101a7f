"""Every mutation still applies to the code of today, and names tests that exist."""

from __future__ import annotations

import pytest

from tests.sweeps.mutations import Mutation, mutations
from tests.sweeps.sweep import ROOT


@pytest.mark.parametrize("mutation", [each for found in mutations().values() for each in found], ids=lambda m: m.name)
def test_a_mutation_applies_to_the_code_of_today(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    compile(mutation.applied(text), mutation.file, "exec")
    assert mutation.applied(text) != text
    assert [name for name in mutation.tests if not (ROOT / name.partition("::")[0]).is_file()] == []
    assert mutation.folder != "tests"
