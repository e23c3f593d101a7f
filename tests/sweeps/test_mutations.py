"""Every mutation still applies to the code of today, and names tests that exist."""

from __future__ import annotations

from tests.sweeps.mutations import mutations
from tests.sweeps.sweep import ROOT


def test_mutations_apply_to_the_code_of_today() -> None:
    for mutation in (each for found in mutations().values() for each in found):
        text = (ROOT / mutation.file).read_text()
        compile(mutation.applied(text), mutation.file, "exec")
        assert mutation.applied(text) != text, mutation.name
        assert [name for name in mutation.tests if not (ROOT / name.partition("::")[0]).is_file()] == [], mutation.name
        assert mutation.folder != "tests", mutation.name
