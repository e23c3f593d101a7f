"""The package: its Python API from text to a model that writes, and a wheel that has what a checkout has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from foundation.errors import ConfigError, DataError, TrainingError
from pipeline.cluster.status.run import RunStatus
from tests.conftest import ROOT, text_folders, tiny_config, write_config
from tests.support import output_of, refusal_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunStatus:
    """A run of 4 steps on two processes."""
    work = tmp_path_factory.mktemp("api")
    corpus = {
        "output": str(work / "tokens"),
        "sources": [{"type": "text", "path": str(folder)} for folder in text_folders()],
        "tokenizer": {"train": "bpe", "vocab_size": 4096},
        "heldout_fraction": 0.15,
        "seed": 3,
    }
    tokens = headrace.prepare_corpus(corpus, workers=1, **{"tokenizer.vocab_size": 400})
    assert tokens == work / "tokens"
    config = write_config(work / "run.json", tiny_config(tokens, work / "run"))
    brief = {"params": {"warmup_num_steps": 1, "decay_num_steps": 2}}
    return headrace.train(config, nproc=2, run={"steps": 4}, scheduler=brief, evaluation={"samples": 4})


def test_a_corpus_is_prepared_trained_on_and_the_run_described(trained: RunStatus) -> None:
    assert (trained.step, trained.steps, trained.finished) == (4, 4, True)
    assert trained.loss < 7
    assert trained.checkpoint == trained.dir / "checkpoints/step-00000004"
    manifest = json.loads((trained.dir / "manifest.json").read_text())
    assert manifest["config"]["run"]["seed"] == 7  # of the file: objects are merged key by key
    tokenizer = json.loads((trained.dir.parent / "tokens/manifest.json").read_text())["config"]["tokenizer"]
    assert (tokenizer["train"], tokenizer["vocab_size"]) == ("bpe", 400)


def test_a_run_and_a_model_folder_are_loaded_and_write(trained: RunStatus, tmp_path: Path) -> None:
    model, tokenizer = headrace.load(trained.dir, device="cpu")
    inputs = tokenizer("def ", return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(ids[0]).startswith("def ")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    again, _ = headrace.load(str(tmp_path / "model"), device="cpu")
    assert again.generate(**inputs, max_new_tokens=3, do_sample=False).tolist() == ids.tolist()


@pytest.mark.integration
def test_a_finished_run_is_not_trained_again(trained: RunStatus) -> None:
    config = json.loads((trained.dir.parent / "run.json").read_text())
    brief = {"params": {"warmup_num_steps": 1, "decay_num_steps": 2}}
    again = headrace.train(config, run={"steps": 4}, scheduler=brief, evaluation={"samples": 4})
    assert (again.step, again.checkpoint) == (trained.step, trained.checkpoint)


def test_a_refusal_is_raised_with_its_message_and_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingError, match=r"run\.steps = 'many'\n  why: it has to be a whole number") as caught:
        headrace.train(tiny_config(tmp_path, tmp_path / "run"), run={"steps": "many"})
    assert caught.value.exit_code == 2
    assert "run.steps = 'many'" in capsys.readouterr().err
    with pytest.raises(DataError, match="there is no such key"):
        headrace.prepare_corpus({"output": str(tmp_path / "t"), "source": []})
    with pytest.raises(ConfigError, match="no such file"):
        headrace.prepare_corpus(tmp_path / "nowhere.json")
    with pytest.raises(DataError, match="no such directory"):
        headrace.load(tmp_path / "nowhere")


def test_importing_headrace_imports_no_library() -> None:
    code = "import sys, headrace; print([n for n in ('torch', 'numpy', 'pydantic', 'typer') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert set(headrace.__all__) == {"__version__", "load", "prepare_corpus", "train"}
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = headrace.trian  # type: ignore[attr-defined]


PACKED = (
    "headrace",
    "foundation",
    "data_prep",
    "pipeline",
    "ds_configs",
    "slurm",
    "demo",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "Makefile",
    "constraints.txt",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree from `make wheelhouse`, installed from there without a network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    # the compiled extension is optional, and has tests of its own; what headrace needs is here already
    env = {**os.environ, "CC": "false"}
    options = "WHEEL_OPTIONS=--quiet --no-index --no-deps --no-build-isolation"
    build = ["make", "--silent", "wheelhouse", f"PYTHON={sys.executable}", f"WHEELHOUSE={out}", options]
    output_of(subprocess.run(build, capture_output=True, text=True, check=False, env=env, cwd=source))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    install = [*pip, "--no-deps", "--no-compile", "--find-links", str(out), "--target", str(out / "site"), "headrace"]
    output_of(subprocess.run(install, capture_output=True, text=True, check=False))
    return out / "site"


def run(installed: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command of the wheel, far from the checkout."""
    code = (
        f"import sys; sys.path[:] = [{str(installed)!r}, *(p for p in sys.path if p != {str(ROOT)!r})];"
        "import headrace.commands.app as app; assert 'site' in app.__file__, app.__file__; app.main()"
    )
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_wheel_has_the_configs_the_job_scripts_and_the_demo(installed: Path) -> None:
    share = installed / "headrace" / "share"
    for folder in ("ds_configs", "slurm", "demo"):
        packed, here = (
            {path.relative_to(top): path.read_bytes() for path in top.rglob("*") if path.suffix not in ("", ".pyc")}
            for top in (share / folder, ROOT / folder)
        )
        assert packed == here
    assert (installed / "pipeline/evaluation/report/page.css").is_file()
    assert (installed / "pipeline/config/foreign_names.json").is_file()
    assert (installed / "pipeline/plan/fake_gpu/cuda_guard.cpp").is_file()
    assert not list(installed.glob("tests*"))


def test_the_wheel_has_the_console_script(installed: Path) -> None:
    points = next(installed.glob("*.dist-info")) / "entry_points.txt"
    assert "headrace = headrace.commands.app:main" in points.read_text()


def test_every_shipped_config_loads_by_its_name_from_anywhere(installed: Path, tmp_path: Path) -> None:
    said = output_of(run(installed, "check", "--config", "ds_configs/zero3.json", "--rules-only", cwd=tmp_path))
    assert "ZeRO-3" in said
    output = refusal_of(run(installed, "check", "--config", "ds_configs/zero33.json", "--rules-only", cwd=tmp_path))
    assert "no such file" in output
