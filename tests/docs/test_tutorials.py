"""Every command of the tutorials runs as printed: a reader who copies block after block gets to the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docs.shell import run_printed

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
KILLS = ("a-run-that-failed",)
"""Pages that look for a child of a process that they have started."""
SWEPT = {*KILLS, "chat-fine-tuning", "choosing-a-layout", "first-hour", "train-longer"}
"""Pages that take minutes: `make sweep-tests` runs them. The first hour has the commands of the README and the demo."""
BLOCK = re.compile(r"(?P<note><!-- not run: [^>]*-->\n)?^```bash\n(?P<commands>.*?)^```$", re.MULTILINE | re.DOTALL)


def commands_of(page: Path) -> list[str]:
    """The bash blocks of a page that are to be run; a comment before a block says why another one is not."""
    return [found["commands"] for found in BLOCK.finditer(page.read_text()) if not found["note"]]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=pytest.mark.sweep if page.stem in SWEPT else pytest.mark.integration)
        for page in TUTORIALS
    ],
)
def test_the_commands_of_a_tutorial_run_as_printed(page: Path, tmp_path: Path) -> None:
    run_printed("\n".join(commands_of(page)), tmp_path, warm=page.stem not in KILLS)


def test_every_tutorial_has_commands() -> None:
    assert [page.name for page in TUTORIALS if not commands_of(page)] == []
