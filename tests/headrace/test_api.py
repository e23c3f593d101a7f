"""The Python API, from text to a model that writes, on a corpus that takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from foundation.errors import ConfigError, DataError, TrainingError
from pipeline.cluster.status.run import RunStatus
from tests.conftest import text_folders, tiny_config, write_config


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


@pytest.mark.integration
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
