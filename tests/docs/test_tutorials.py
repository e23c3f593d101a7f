"""Commands of the tutorials and of the README run as printed: a reader who copies block after block gets to the end."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from data_prep.formats.tokenfile import TokenFile
from pipeline.config.sections.data import DataSection, SourceSection
from pipeline.data.mixture import open_mixture
from tests.checkpoint.importing.megatron_trainer import FOLDER
from tests.conftest import ROOT, make_tokens, text_folders
from tests.warm_python import folder


def run_printed(commands: str, cwd: Path, *, warm: bool = True) -> str:
    """Runs commands in bash with this environment's programs first on PATH; returns what they print.

    Without `warm` python, headrace and deepspeed are not forked from a server: for commands that look for processes.

    Raises AssertionError with the end of it when a command fails.
    """
    programs = [folder()] * warm + [Path(sys.executable).parent, os.environ["PATH"]]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=cwd,
        env={**os.environ, "PATH": os.pathsep.join(map(str, programs))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def fewer_steps(text: str) -> str:
    text = re.sub(r'"steps": \d+', '"steps": 12', text)
    return re.sub(r'"(warmup_num_steps|checkpoint_every|every)": \d+', r'"\1": 4', text)


TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
KILLS = ("a-run-that-failed",)
"""Pages that look for a child of a process that they have started."""
SWEPT = {*KILLS, "chat-fine-tuning", "choosing-a-layout", "first-hour", "train-in-stages", "train-longer"}
"""Pages that take minutes: `make sweep-tests` runs them; the first hour runs with fewer steps, too. With README, wheel
and demo they are ten jobs of an afternoon: install, a shipped config, one's own text, a published model, chat, stop and
resume, evaluate, export and complete, compress, plan and submit."""
IN_A_CLONE = {"train-in-stages": ("demo", "ds_configs")}
"""Pages whose commands read files of the repository."""
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
    for name in IN_A_CLONE.get(page.stem, ()):
        shutil.copytree(ROOT / name, tmp_path / name)
    run_printed("\n".join(commands_of(page)), tmp_path, warm=page.stem not in KILLS)


@pytest.mark.integration
def test_the_commands_of_the_first_hour_run_with_fewer_steps(tmp_path: Path) -> None:
    commands = fewer_steps("\n".join(commands_of(ROOT / "docs/tutorials/first-hour.md")))
    assert "largest logit difference to the trained model 0" in run_printed(commands, tmp_path)


def test_every_tutorial_has_commands() -> None:
    assert [page.name for page in TUTORIALS if not commands_of(page)] == []


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
    config.write_text(fewer_steps(config.read_text()))
    work = tmp_path / "out" / "demo"
    work.mkdir(parents=True)
    make_tokens(work, text_folders())
    commands = block_after(AFTER_THE_DEMO)
    assert "headrace train" in commands
    assert "deepspeed pipeline/train.py" in commands
    said = run_printed(commands.replace("source .venv/bin/activate\n", ""), tmp_path)
    assert "finished: 12 steps" in said


@pytest.mark.integration
def test_the_commands_for_ones_own_text_and_a_cluster_run_as_printed(tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text(block_after(CORPUS).replace("32000", "512"))
    (tmp_path / "corpus").mkdir()
    lines = "".join(f'{{"content": "document {number} about number {number * 7}"}}\n' for number in range(2000))
    (tmp_path / "corpus" / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    plan = next(line for line in block_after(AFTER_THE_DEMO).splitlines() if line.startswith("headrace plan"))
    submit = block_after("## A cluster").splitlines()[0]
    assert "; --dry-run prints them" in submit
    prep = [line for line in block_after(CORPUS, 1).splitlines() if line.startswith("headrace prep")]
    output = run_printed("\n".join([plan, submit.replace("#", "--dry-run #"), *prep]), tmp_path)
    for found in ("GPU-hours", "nothing was submitted or written (--dry-run)", "fingerprint"):
        assert found in output


def test_the_code_that_reads_tokens_in_another_loop_runs(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    Path("out/tokens").symlink_to(tokens)
    page = ROOT / "docs/how-to/tokens-elsewhere.md"
    torch_code, numpy_code, megatron_code = re.findall(r"(?ms)^```python\n(.*?)^```$", page.read_text())
    variables: dict[str, Any] = {"__name__": "page"}
    exec(torch_code, variables)
    data = DataSection(sources=(SourceSection(path="out/tokens"),), sequence_length=64)
    assert variables["rows"].tolist() == open_mixture(data, seed=42).read(range(24, 32)).tolist()
    exec(numpy_code, variables)
    last = TokenFile.open(variables["path"].with_suffix(""))
    assert variables["document"].tolist() == last.tokens[: last.document_starts([1])[0]].tolist()
    words = run_printed(*commands_of(page), tmp_path, warm=False).split()
    assert words[words.index("--valid-data-path") - 1] == str(variables["path"].with_suffix(""))
    assert Path(words[-1], "tokenizer.json").is_file()
    if FOLDER in os.environ:  # of megatron-core
        monkeypatch.syspath_prepend(os.environ[FOLDER])
        exec(megatron_code, variables)
        ends = last.document_starts(range(1, last.documents + 1))
        theirs = [variables["dataset"][i].tolist() for i in range(last.documents)]
        assert theirs == [ids.tolist() for ids in np.split(last.tokens, ends)[:-1]]
