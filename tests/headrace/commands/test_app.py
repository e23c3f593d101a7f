"""The command `headrace`: its verbs, its help, what a typo is answered with, and how quick it is."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from data_prep.__main__ import COMMANDS as DATA_PREP
from headrace.commands.app import app
from headrace.commands.from_argparse import parameters_of
from pipeline.__main__ import COMMANDS as PIPELINE
from tests.conftest import ROOT

VERBS = {*PIPELINE, "prep", "status", "submit", "schema", "explain"}
HEAVY = ("torch", "transformers", "deepspeed", "datasets", "matplotlib")


def run(*words: object) -> Result:
    """The command in this process; its help is 100 columns wide, without colors."""
    env = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, [str(word) for word in words], env=env, prog_name="headrace")


def complete(words: str) -> list[str]:
    """What bash is offered at the end of a command line."""
    env = {**os.environ, "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    command = [sys.executable, "-m", "headrace"]
    done = subprocess.run(
        command, env={**env, "_HEADRACE_COMPLETE": "complete_bash"}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_without_a_verb_all_verbs_are_printed_in_groups() -> None:
    done = run()
    assert done.exit_code == 0
    assert done.output == run("--help").output
    groups = ["Data prep", "Training", "Cluster", "Models", "Compression", "Config"]
    places = [done.output.index(f" {group} ") for group in groups]
    assert places == sorted(places)
    listed = {
        line.split()[1] for line in done.output.splitlines() if line.startswith("│ ") and not line.startswith("│  ")
    }
    assert listed >= VERBS


@pytest.mark.parametrize("verb", sorted({*VERBS, *(f"prep {name}" for name in ("run", *DATA_PREP))}))
def test_every_verb_answers_help(verb: str) -> None:
    done = run(*verb.split(), "--help")
    assert done.exit_code == 0, done.output
    assert f"Usage: headrace {verb}" in done.output


@pytest.mark.parametrize("verb", sorted(PIPELINE))
def test_the_options_are_those_of_the_module(verb: str) -> None:
    parser = argparse.ArgumentParser(prog=verb)
    module = __import__(PIPELINE[verb][0], fromlist=["add_arguments"])
    module.add_arguments(parser)
    if verb == "checkpoint":  # it has subcommands of its own
        return
    text = run(verb, "--help").output
    hidden = {"local_rank", "phase"}
    for parameter in parameters_of(parser):
        flags = next(action.option_strings for action in parser._actions if action.dest == parameter.name)
        assert parameter.name in hidden or all(flag in text for flag in flags)


def test_options_that_a_module_groups_have_a_panel_of_their_own() -> None:
    text = run("ladder", "--help").output
    _, options, check = text.split("╭─ ")
    assert check.startswith("Coordinate check ─")
    flags = ("--coordinate-check", "--rate-check", "--widths", "--depths", "--steps", "--step-tokens", "--rates")
    assert all(flag in check and flag not in options for flag in flags)
    assert "--rungs" in options


def test_help_imports_no_torch_and_takes_well_below_half_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "headrace", "--help"], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "prep" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


HELP_OF_ALL = """
import json, sys
from typer.testing import CliRunner
from headrace.commands.app import app
found = {}
for verb in sys.argv[1:]:
    before = {*sys.modules}
    done = CliRunner().invoke(app, [*verb.split(), "--help"], prog_name="headrace")
    assert done.exit_code == 0, verb
    found[verb] = sorted({name.partition(".")[0] for name in {*sys.modules} - before})
print(json.dumps(found))
"""


def test_help_of_no_verb_imports_what_takes_seconds() -> None:
    verbs = [*sorted(VERBS), "prep pack", "prep stats"]
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL, *verbs], capture_output=True, text=True, check=True)
    imported = json.loads(done.stdout)
    assert "pipeline" in imported["check"]  # the list is what we think it is
    assert {verb: heavy for verb, names in imported.items() if (heavy := {*names} & {*HEAVY})} == {}


def test_the_version_is_that_of_the_package() -> None:
    done = run("--version")
    assert (done.exit_code, done.output) == (0, "headrace 0.5.0\n")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("trian",), "Did you mean 'train'?"),
        (("prep", "pln"), "Did you mean 'plan'"),
        (("train", "--confg", "x"), "--config"),
        (("prep", "--confg", "x"), "--config"),
        (("check", "--config", "x", "--processes", "two"), "invalid literal"),
        (("prove", "--config", "x", "--steps", "two"), "'two' is not a whole number"),
        (("export", "run", "out", "--dtype", "fp64"), "'fp64' is none of bf16, fp32"),
        (("samples", "run", "--step", "1", "--sample", "2"), "give one of --step and --sample"),
        (("samples", "run"), "give one of --step and --sample"),
        (("samples", "run", "--step", "one"), "neither a number nor FIRST:LAST"),
        (("train",), "Missing option '--config'"),
        (("prep", "--workers", "2"), "Missing option '--config'"),
        (("prep", "--config", "x", "plan"), "give the options after 'plan'"),
    ],
)
def test_a_wrong_command_line_is_refused_with_what_is_right(words: tuple[str, ...], answer: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert answer in " ".join(done.output.replace("│", " ").split())
    assert "Traceback" not in done.output


def test_plan_is_the_planner_of_training_runs() -> None:
    done = run("plan", "--machine", "h100")
    assert done.exit_code == 2
    assert "there is no run to plan" in " ".join(done.output.split())


def test_an_error_of_the_user_has_no_traceback_and_its_own_exit_code(tmp_path: Path) -> None:
    for words in (("train",), ("check",), ("prep",), ("prep", "plan"), ("quantize",)):
        done = run(*words, "--config", tmp_path / "nowhere.json")
        assert done.exit_code == 2
        assert "no such file" in done.output
        assert "Traceback" not in done.output


def test_a_config_is_refused_as_by_the_entry_point(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("extends: []\nmodel: {config: {model_type: llama}}\nrun: {dir: runs/x, stepz: 1e3}\n")
    done = run("train", "--config", config)
    assert done.exit_code == 2
    assert "run.stepz = 1000.0\n  why: there is no such key\n  try: did you mean 'steps'?" in done.output


def test_an_overridden_field_reaches_the_config() -> None:
    done = run("check", "--config", ROOT / "ds_configs/zero3.json", "--rules-only", "--set", "run.dir=elsewhere")
    assert done.exit_code == 0, done.output
    assert "run directory  elsewhere" in done.output


def test_verbs_options_choices_and_config_keys_are_completed() -> None:
    assert complete("headrace tr") == ["train"]
    assert complete("headrace prep pl") == ["plan"]
    assert complete("headrace train --np") == ["--nproc"]
    assert complete("headrace export --dtype b") == ["bf16"]
    assert complete("headrace train --set run.keep_e") == ["run.keep_every="]
    assert complete("headrace prep plan --set tokenizer.vocab") == ["tokenizer.vocab_size="]
    assert complete("headrace explain anomalies.non") == ["anomalies.non_finite"]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_there_is_a_completion_script_for_every_shell(shell: str) -> None:
    env = {**os.environ, "_HEADRACE_COMPLETE": f"source_{shell}"}
    done = subprocess.run([sys.executable, "-m", "headrace"], env=env, capture_output=True, text=True, check=True)
    assert "_HEADRACE_COMPLETE=complete_" in done.stdout


def test_the_console_script_is_the_same_command() -> None:
    script = Path(sys.executable).with_name("headrace")
    if not script.exists():
        pytest.skip("headrace is not installed here")
    done = subprocess.run([script, "schema", "quantize"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["title"] == "headrace: the config of a quantization"
    done = subprocess.run([script, "trian"], capture_output=True, text=True, check=False)
    assert done.returncode == 2


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m headrace schema run | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr
