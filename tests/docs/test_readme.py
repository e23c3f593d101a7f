"""The commands of the README run as printed, in fewer steps, after data prep on a small corpus, not the demo's."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import zstandard

from tests.conftest import ROOT, make_tokens, text_folders
from tests.docs.shell import run_printed

AFTER_THE_DEMO = "After the demo, the same with your own hands:"
CORPUS = "## Your own text, your own model"


def block_after(text: str, number: int = 0) -> str:
    """An indented block of the README: the first, second, ... after a text."""
    rest = (ROOT / "README.md").read_text().partition(text)[2]
    blocks = re.findall(r"(?:^    .*\n)+", rest, flags=re.MULTILINE)
    return re.sub(r"^    ", "", blocks[number], flags=re.MULTILINE)


@pytest.mark.integration
def test_the_commands_after_the_demo_run_as_printed(tmp_path: Path) -> None:
    for name in ("ds_configs", "pipeline"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    config = tmp_path / "ds_configs" / "zero3.json"
    shorter = config.read_text().replace('"steps": 100', '"steps": 12')
    shorter = shorter.replace('"checkpoint_every": 25', '"checkpoint_every": 3')
    shorter = shorter.replace('"warmup_num_steps": 20', '"warmup_num_steps": 4')
    config.write_text(shorter.replace('"every": 50', '"every": 6'))
    work = tmp_path / "out" / "demo"
    work.mkdir(parents=True)
    make_tokens(work, text_folders())
    commands = block_after(AFTER_THE_DEMO)
    assert "headrace train" in commands
    assert "deepspeed pipeline/train.py" in commands
    said = run_printed(commands.replace("source .venv/bin/activate\n", ""), tmp_path)
    assert "finished: 12 steps" in said


@pytest.mark.integration
def test_the_commands_of_data_prep_run_as_printed(tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text(block_after(CORPUS).replace("32000", "512"))
    (tmp_path / "corpus").mkdir()
    lines = "".join(f'{{"content": "document {number} about number {number * 7}"}}\n' for number in range(2000))
    (tmp_path / "corpus" / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    commands = [line for line in block_after(CORPUS, 1).splitlines() if line.startswith("headrace prep")]
    assert len(commands) == 3
    assert "fingerprint" in run_printed("\n".join(commands), tmp_path)
