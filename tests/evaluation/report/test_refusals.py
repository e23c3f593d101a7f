"""What the report refuses, before any model is loaded and with nothing written."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from foundation.errors import ConfigError, DataError, HeadraceError
from pipeline.evaluation.report import command
from pipeline.evaluation.report.inputs import check
from tests import warm
from tests.evaluation.heldout.small import SEQUENCE
from tests.evaluation.report.conftest import make_run
from tests.support import refusal_of

Check = Callable[..., object]


@pytest.fixture
def checked(model: Path, tokens: Path, run_dir: Path, tmp_path: Path) -> Check:
    """Checks a command line that is right but for what is given in its place."""

    def go(*more: str, out: Path | None = None, run: str | None = None, folder: str | None = None) -> object:
        named = ["--run", run or f"run={run_dir}", "--model", folder or f"model={model}"]
        data = ["--data", str(tokens), "--sequence-length", str(SEQUENCE)]
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        return check(parser.parse_args([str(out or tmp_path / "report.html"), *named, *data, *more]))

    return go


def test_valid_arguments_pass(checked: Check) -> None:
    assert checked("--prompt", "The mill")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--run", "nothing"], r"--run.*\n.*NAME=DIRECTORY"),
        (["--model", "=somewhere"], r"--model.*\n.*NAME=DIRECTORY"),
        (["--run", "run=elsewhere"], r"already has that name"),
        (["--model", "model=elsewhere"], r"already has that name"),
        (["--prompt", ""], r"--prompt"),
        (["--tokens", "0"], r"--tokens"),
        (["--max-tokens", "0"], r"max_tokens"),
        (["--sequence-length", "129"], r"--sequence-length = 129"),
        (["--data", "nowhere"], r"nowhere: no such directory"),
        (["--run", "other=nowhere"], r"nowhere: no such directory"),
        (["--model", "other=nowhere"], r"nowhere: no such directory"),
    ],
)
def test_invalid_arguments_are_named(checked: Check, more: list[str], message: str) -> None:
    with pytest.raises(HeadraceError, match=message):
        checked(*more)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "nothing to report"),
        (["--model", "a=b"], "--data.*\n.*leave --model out"),
        (["--run", "a=b", "--data", "tokens"], "--data.*there is no --model"),
        (["--run", "a=b", "--prompt", "The mill"], "--prompt.*there is no --model"),
    ],
)
def test_models_need_data_and_runs_need_nothing(given: list[str], message: str, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        check(parser.parse_args([str(tmp_path / "report.html"), *given]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), r"has no metrics\.jsonl"),
        (lambda run: (run / "manifest.json").unlink(), "with the first checkpoint"),
        (lambda run: (run / "metrics.jsonl").open("a").write('{"kind": "step", "step": 41}\n'), "is damaged"),
    ],
    ids=["no journal", "before its first checkpoint", "a step without its metrics"],
)
def test_an_incomplete_run_is_refused_by_name(
    checked: Check, run_dir: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(run_dir)
    with pytest.raises(DataError, match=message):
        checked()


def test_a_run_without_a_finished_step_is_refused(checked: Check, tmp_path: Path) -> None:
    empty = make_run(tmp_path / "empty", steps=0)
    with pytest.raises(DataError, match="no finished step"):
        checked(run=f"run={empty}")


@pytest.mark.parametrize("line", ["nonsense", '{"step": 41}', '{"kind": "step", "step": "41"}', "[1]"])
def test_a_damaged_line_of_a_journal_is_skipped_and_named(
    checked: Check, run_dir: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert checked()
    assert "metrics.jsonl is damaged in line" in capsys.readouterr().err


def test_a_partial_last_line_is_skipped(checked: Check, run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "ste')
    assert checked()


def test_a_directory_of_another_kind_is_refused(checked: Check, tokens: Path) -> None:
    with pytest.raises(DataError, match="holds a 'tokens', but a 'run'"):
        checked(run=f"run={tokens}")


def test_an_output_that_cannot_be_written_is_refused(checked: Check, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is a directory"):
        checked(out=tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        checked(out=tmp_path / "nowhere" / "report.html")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_write_permission_is_refused(checked: Check, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="not writable"):
        checked(out=tmp_path / "locked" / "report.html")


def test_a_prompt_needs_a_tokenizer(checked: Check, model: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    for path in bare.glob("tokenizer*"):
        path.unlink()
    assert checked(folder=f"model={bare}")
    with pytest.raises(ConfigError, match="has no tokenizer to read a text with"):
        checked("--prompt", "The mill", folder=f"model={bare}")


def test_the_command_exits_with_2_and_writes_nothing(model: Path, tokens: Path, tmp_path: Path) -> None:
    given = ["--run", f"a={tmp_path / 'nowhere'}", "--model", f"a={model}", "--data", tokens]
    assert "no such directory" in refusal_of(warm.run("-m", "pipeline", "report", tmp_path / "report.html", *given))
    assert list(tmp_path.iterdir()) == []
