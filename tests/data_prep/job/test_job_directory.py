"""The job directory: which state is resumed, and which is an error or removed."""

from __future__ import annotations

import ctypes
import json
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.formats.tokenfile import TokenFile, shard_prefix, with_suffix
from data_prep.task import scratch_path
from foundation.directory import read_manifest
from tests.data_prep.conftest import cli, run_limited, tree, write_config
from tests.support import output_of, refusal_of

PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
COMMAND = [sys.executable, "-m", "data_prep"]


def rows(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.mark.usefixtures("texts")
def test_the_rest_of_a_partly_removed_job_is_not_resumed(work: Path) -> None:
    config = write_config()
    cli("prepare", "--config", config)
    cli("phase", "map", "--config", config, "--task", "0", "--of", "1")
    (work / ".tokens.job/job.json").unlink()
    other = ("--set", "seed=7", "--set", "tokenizer.vocab_size=500")
    assert "finished before" not in cli("--config", config, *other).stderr
    cli("--config", config, *other, "--set", "output=clean")
    assert tree(work / "tokens") == tree(work / "clean")


@pytest.mark.usefixtures("texts")
def test_a_finished_map_task_with_a_missing_run_is_an_error(work: Path) -> None:
    config = write_config()
    cli("prepare", "--config", config)
    cli("phase", "map", "--config", config, "--task", "0", "--of", "1")
    task = next(path for path in sorted((work / ".tokens.job/map").iterdir()) if list(path.glob("run-*")))
    shutil.rmtree(next(task.glob("run-*")))
    assert f"{task.relative_to(work)} has 0 runs, and 1 were written" in cli("--config", config, code=2).stderr
    shutil.rmtree(task)
    cli("--config", config)


def test_saved_builder_data_is_used_only_for_the_same_arguments(work: Path) -> None:
    rows(work / "a.jsonl", [f"a {i}" for i in range(60)])
    rows(work / "b.jsonl", [f"b {i}" for i in range(60)])

    def source(file: str, **fields: str) -> list[dict[str, Any]]:
        kwargs = {"data_files": file, "cache_dir": "cache"}
        return [{"type": "datasets", "builder": "json", "split": "train", "name": "built", "kwargs": kwargs, **fields}]

    error = cli("--config", write_config(sources=source("a.jsonl", text_field="txt")), code=2).stderr
    assert "txt" in error
    cli("--config", write_config(sources=source("b.jsonl")))
    texts = read_texts(work / "tokens")
    assert {text[0] for text in texts} == {"b"}


def read_texts(tokens: Path) -> list[str]:
    from tokenizers import Tokenizer  # noqa: PLC0415

    tokenizer = Tokenizer.from_file(str(tokens / "tokenizer" / "tokenizer.json"))
    file = TokenFile.open(shard_prefix(tokens, "train", 0))
    return [tokenizer.decode(ids.tolist()) for ids in np.split(file.tokens, np.cumsum(file.sequence_lengths)[:-1])]


def test_more_runs_than_the_limit_of_open_files_can_be_reduced(work: Path) -> None:
    (work / "many").mkdir()
    for i in range(150):
        (work / "many" / f"{i}.txt").write_text(f"{i} turns the wheel")
    config = write_config(sources=[{"path": "many"}], task_bytes=1)
    cli("prepare", "--config", config)
    cli("phase", "map", "--config", config, "--task", "0", "--of", "1", "--workers", "2")
    few_files = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (100, 100))
    output_of(run_limited(few_files, "--config", config, "--workers", "1"))
    splits = read_manifest(work / "tokens", kind="tokens").details["splits"]
    assert sum(split["documents"] for split in splits.values()) == 150


def test_an_unfinished_job_of_another_format_is_an_error(work: Path) -> None:
    rows(work / "a.jsonl", [f"{i} turns the wheel of the mill" for i in range(80)])
    config = write_config(sources=[{"path": "a.jsonl"}])
    cli("prepare", "--config", config)
    path = work / ".tokens.job/job.json"
    saved = json.loads(path.read_text())
    del saved["format"]  # as in the first versions
    path.write_text(json.dumps(saved))
    share = ("phase", "map", "--task", "0", "--of", "1")
    for command in ((), ("prepare",), share, ("finish",)):
        assert "these differ: format" in cli(*command, "--config", config, code=2).stderr


def test_the_scratch_files_of_killed_tasks_are_removed(work: Path) -> None:
    rows(work / "a.jsonl", [f"{i} turns the wheel of the mill" for i in range(80)])
    config = write_config(sources=[{"path": "a.jsonl"}])
    cli("prepare", "--config", config)
    cli("phase", "map", "--config", config, "--task", "0", "--of", "1")
    job = work / ".tokens.job"
    scratch = scratch_path(job / "map/00000"), scratch_path(job / "reduce/train-00000.json")
    scratch[0].mkdir()
    leftover = [scratch[0], *(with_suffix(scratch[1], suffix) for suffix in (".bin", ".idx", ".mask"))]
    for path in leftover[1:]:
        path.write_bytes(b"partial")
    cli("prepare", "--config", config)
    assert not any(path.exists() for path in leftover)


@pytest.mark.integration
def test_shares_of_a_reduce_phase_with_deduplication_can_start_at_the_same_time(work: Path) -> None:
    rows(work / "a.jsonl", [f"{i % 40} turns the wheel of the mill" for i in range(80)])
    config = write_config(sources=[{"path": "a.jsonl"}], dedup={"exact": True}, heldout_fraction=0.3, shard_tokens=50)
    cli("prepare", "--config", config)
    for phase in ("map", "pairs", "copies"):
        cli("phase", phase, "--config", config, "--task", "0", "--of", "1")
    of = [*COMMAND, "phase", "reduce", "--config", config, "--of", "6", "--task"]
    shares = [subprocess.Popen([*of, str(share)], stderr=subprocess.PIPE, text=True) for share in range(6)]
    assert [(share.wait(), share.communicate()[1]) for share in shares if share.wait()] == []
    cli("finish", "--config", config)


def test_word_lists_and_tokenizers_that_change_between_phases_are_errors(work: Path) -> None:
    rows(work / "a.jsonl", [f"{i} turns the wheel of the mill" for i in range(60)])
    (work / "words.txt").write_text("lemming\n")
    clean = [{"step": "word_blocklist", "words": ["words.txt"]}]
    cli("--config", write_config(sources=[{"path": "a.jsonl"}], output="first"))
    tokenizer = {"path": str(shutil.copytree(work / "first/tokenizer", work / "given"))}
    config = write_config(sources=[{"path": "a.jsonl"}], clean=clean, tokenizer=tokenizer)
    cli("prepare", "--config", config)
    share = ("--config", config, "--task", "0", "--of", "1")
    (work / "words.txt").write_text("wheel\n")
    assert "these differ: cleaning" in cli("phase", "map", *share, code=2).stderr
    (work / "words.txt").write_text("lemming\n")
    cli("phase", "map", *share)
    cli("phase", "reduce", *share)
    named = work / "given/tokenizer_config.json"
    named.write_text(json.dumps(json.loads(named.read_text()) | {"extra": 1}))
    assert "these differ: tokenizer" in cli("finish", "--config", config, code=2).stderr
    assert not (work / "tokens").exists()


def test_a_split_that_deduplication_empties_is_an_error(work: Path) -> None:
    page = " ".join(f"word{n}" for n in range(80))
    rows(work / "a.jsonl", [f"{page} and {i}" for i in range(40)])
    config = write_config(sources=[{"path": "a.jsonl"}], dedup={"near": {}}, heldout_fraction=0.4)
    error = cli("--config", config, code=2).stderr
    assert "39 dedup: near copy" in error
    assert not (work / "tokens").exists()


def test_the_error_for_an_unreadable_input_file_says_why(work: Path) -> None:
    rows(work / "a.jsonl", ["x"] * 20)
    (work / "a.jsonl").chmod(0)
    config = write_config(sources=[{"path": "a.jsonl"}])
    said = refusal_of(run_limited(drop_root_capabilities, "--config", config))
    assert "Permission denied" in said
    assert "Traceback" not in said


def drop_root_capabilities() -> None:
    """Drops the capabilities that let root read any file from the child process; no effect for other users."""
    libc = ctypes.CDLL(None)
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
