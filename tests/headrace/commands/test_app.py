"""The command `headrace`: its verbs, its help, what a typo is answered with, and how quick it is."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.__main__ import COMMANDS
from foundation.command_line import execute
from foundation.verbs import VERBS as TABLE
from headrace.commands import app
from tests.conftest import ROOT
from tests.support import refusal_of

VERBS = {verb.name: verb for verb in TABLE}
DATA_PREP = [verb.name for verb in COMMANDS]
HEAVY = ("torch", "transformers", "deepspeed", "datasets", "matplotlib")


def run(*words: object, code: int = 0) -> str:
    """What the command prints in this process, on both streams and 100 columns wide; checks its exit code."""
    output, width = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            found = app.run([str(word) for word in words])
    finally:
        os.environ.pop("COLUMNS") if width is None else os.environ.update(COLUMNS=width)
    assert found == code, output.getvalue()
    return output.getvalue()


def complete(words: str, tmp_path: Path) -> list[str]:
    """What bash is offered at the end of a command line."""
    out = tmp_path / "offered"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    env = {**os.environ, **asked, "COMP_LINE": words, "COMP_POINT": str(len(words)), "COMP_TYPE": "9"}
    subprocess.run([sys.executable, "-m", "headrace"], env=env, cwd=tmp_path, capture_output=True, check=True)
    return out.read_text().split()


def test_without_a_verb_all_verbs_are_printed_in_groups() -> None:
    said = run()
    assert said == run("--help")
    groups = ["From text to a model that serves", "Data prep", "Training", "Models", "Compression", "Config"]
    places = [said.index(f"\n{group}:\n") for group in groups]
    assert places == sorted(places)
    listed = [line.split()[0] for line in said.splitlines() if line.startswith("  ") and line[2] not in " -"]
    assert listed == list(VERBS)
    assert listed[:8] == ["prep", "check", "plan", "train", "status", "export", "compress", "submit"]


@pytest.mark.parametrize("verb", sorted({*VERBS, *(f"prep {name}" for name in ("run", *DATA_PREP))}))
def test_every_verb_answers_help(verb: str) -> None:
    assert f"usage: headrace {verb}" in run(*verb.split(), "--help")


@pytest.mark.parametrize("door", [["pipeline"], ["pipeline", "prep"], ["data_prep"], ["headrace", "prep"]])
def test_every_door_lists_the_same_verbs_and_suggests_alike(door: list[str]) -> None:
    of_prep = door[-1] != "pipeline"
    command = [sys.executable, "-m", *door]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert all(f"\n  {name} " in done.stdout for name in (DATA_PREP if of_prep else VERBS))
    wrong, meant = ("verfy", "verify") if of_prep else ("trian", "train")
    done = subprocess.run([*command, wrong], capture_output=True, text=True, check=False)
    assert (done.returncode, f"Did you mean '{meant}'?" in done.stderr) == (2, True)


def test_options_that_a_module_groups_have_a_heading_of_their_own() -> None:
    _, options, group = run("import", "--help").replace("checkpoints:", "options:", 1).split("options:\n")
    flags = ("--config", "--set", "--processes", "--step")
    assert all(f"  {flag}" in group and f"  {flag}" not in options for flag in flags)
    assert "--tokenizer" in options


def test_what_the_deepspeed_launcher_puts_in_front_is_accepted() -> None:
    for words in (["--local_rank=1"], ["--local_rank", "1"]):
        run(*words, "check", "--config", ROOT / "ds_configs/zero3.json", "--rules-only")


def test_help_imports_no_torch_and_takes_well_below_half_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "headrace", "--help"], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "prep" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


HELP_OF_ALL = """
import contextlib, io, json, sys
from headrace.commands.app import run
found = {}
for verb in sys.argv[1:]:
    before = {*sys.modules}
    with contextlib.redirect_stdout(io.StringIO()):
        assert run([*verb.split(), "--help"]) == 0, verb
    found[verb] = sorted({name.partition(".")[0] for name in {*sys.modules} - before})
print(json.dumps(found))
"""


def test_help_of_no_verb_imports_what_takes_seconds() -> None:
    verbs = [*sorted(VERBS), "prep pack", "prep stats"]
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL, *verbs], capture_output=True, text=True, check=True)
    imported = json.loads(done.stdout)
    assert "pipeline" in imported["check"]  # the list is what we think it is
    assert {verb: heavy for verb, names in imported.items() if (heavy := {*names} & {*HEAVY})} == {}


IMPORTED = """
import contextlib, io, json, sys
from headrace.commands.app import run
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    code = run(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]))
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("explain zero_optimization.stage", 0),
        ("check --config ds_configs/zero3.json --rules-only", 0),
        ("check --config ds_configs/zero3.json", 2),  # its data is missing
        ("plan --config nowhere.json", 2),
    ],
)
def test_what_the_config_alone_decides_is_answered_without_torch(words: str, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORTED, *words.split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    ended, modules = json.loads(done.stdout)
    assert ended == code
    assert {*modules} & {*HEAVY} == set()


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version") == "headrace 0.6.0\n"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("trian",), "Did you mean 'train'?"),
        (("prep", "pln"), "Did you mean 'plan'?"),
        (("train", "--confg", "x"), "did you mean '--config'?"),
        (("prep", "--confg", "x"), "did you mean '--config'?"),
        (("check", "--config", "x", "--processes", "two"), "'two'"),
        (("prove", "--config", "x", "--steps", "two"), "'two' is not a whole number"),
        (("export", "run", "out", "--dtype", "fp64"), "'fp64' is none of bf16, fp32"),
        (("samples", "run", "--step", "1", "--sample", "2"), "--sample: not allowed with argument --step"),
        (("samples", "run"), "one of the arguments --step --sample is required"),
        (("samples", "run", "--step", "one"), "neither a number nor FIRST:LAST"),
        (("train",), "required: --config"),
        (("prep", "--workers", "2"), "required: --config"),
        (("prep", "--config", "x", "plan"), "give the options after 'plan'"),
    ],
)
def test_a_wrong_command_line_is_refused_with_what_is_right(words: tuple[str, ...], answer: str) -> None:
    said = run(*words, code=2)
    assert answer in " ".join(said.replace("│", " ").split())
    assert "Traceback" not in said


def test_plan_is_the_planner_of_training_runs() -> None:
    assert "there is no run to plan" in " ".join(run("plan", "--machine", "h100", code=2).split())


def test_an_error_of_the_user_has_no_traceback_and_its_own_exit_code(tmp_path: Path) -> None:
    for words in (("train",), ("check",), ("prep",), ("prep", "plan"), ("quantize",)):
        said = run(*words, "--config", tmp_path / "nowhere.json", code=2)
        assert "no such file" in said
        assert "Traceback" not in said


def test_a_config_is_refused_as_by_the_entry_point(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("extends: []\nmodel: {config: {model_type: llama}}\nrun: {dir: runs/x, stepz: 1e3}\n")
    said = run("train", "--config", config, code=2)
    assert "run.stepz = 1000.0\n  why: there is no such key\n  try: did you mean 'steps'?" in said


def test_an_overridden_field_reaches_the_config() -> None:
    said = run("check", "--config", ROOT / "ds_configs/zero3.json", "--rules-only", "--set", "run.dir=elsewhere")
    assert "run directory  elsewhere" in said


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("headrace tr", ["train"]),
        ("headrace prep pl", ["plan"]),
        ("headrace train --np", ["--nproc"]),
        ("headrace compress ver", ["verify"]),
        ("headrace export --dtype b", ["bf16"]),
        ("headrace train --set run.keep_e", ["run.keep_every="]),
        ("headrace compress run --set data.max", ["data.max_tokens="]),
        ("headrace prep plan --set tokenizer.vocab", ["tokenizer.vocab_size="]),
        ("headrace explain anomalies.non", ["anomalies.non_finite"]),
        ("headrace train --config my_r", ["my_run.json"]),
    ],
)
def test_verbs_options_choices_keys_and_files_are_completed(words: str, offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "my_run.json").touch()
    assert complete(words, tmp_path) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_is_installed_once_in_every_shell(shell: str, tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path), "SHELL": f"/bin/{shell}"}
    for _ in range(2):
        command = [sys.executable, "-m", "headrace", "--install-completion"]
        subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    (line,) = (tmp_path / f".{shell}rc").read_text().splitlines()
    script = Path(line.removeprefix('source "').removesuffix('"')).read_text()
    assert "headrace" in script
    assert script.strip() == run("--show-completion", shell).strip()
    run("--show-completion", "fsh", code=2)


def test_the_console_script_is_the_same_command() -> None:
    script = Path(sys.executable).with_name("headrace")
    if not script.exists():
        pytest.skip("headrace is not installed here")
    done = subprocess.run([script, "schema", "quantize"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["title"] == "headrace: the config of a quantization"
    refusal_of(subprocess.run([script, "trian"], capture_output=True, text=True, check=False))


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m headrace schema run | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--deepspeed", "--deepspeed_config", "f.json"], ["--deepspeed", "f.json"]])
def test_the_options_of_deepspeed_and_the_trainer_lead_to_config(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(words, prog="train.py", declare=lambda parser: parser.add_argument("--config", required=True)) == 2
    assert "--config FILE for --deepspeed and --deepspeed_config" in capsys.readouterr().err
