"""A working directory per test, tiny corpora, and the command line in a process of its own."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import warm


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def run_command(work: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs `python -m data_prep ...` in `work`, in a forked process, and checks its exit code."""
    done = warm.run("-m", "data_prep", *arguments, cwd=work, timeout_s=300, imported="data_prep")
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def cli(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """`run_command` in the working directory."""
    return run_command(Path.cwd(), *arguments, code=code)


def cli_of_its_own(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """As `cli`, not forked: its workers have the addresses and keys of stores in this environment."""
    command = [sys.executable, "-m", "data_prep", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def run_limited(limit: Callable[[], object], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a job in a process of its own, which has called `limit` before it starts."""
    command = [sys.executable, "-m", "data_prep", *arguments]
    return subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)


def config_file(work: Path, name: str = "corpus.json", **fields: Any) -> str:
    """Writes a config with a small byte-level BPE and returns its name; keyword arguments replace fields."""
    config = {
        "output": "tokens",
        "sources": [{"path": "texts", "name": "texts"}],
        "tokenizer": {"train": "bpe", "vocab_size": 300},
        "heldout_fraction": 0.1,
    }
    (work / name).write_text(json.dumps(config | fields))
    return name


def write_config(name: str = "corpus.json", **fields: Any) -> str:
    """`config_file` in the working directory."""
    return config_file(Path.cwd(), name, **fields)


def sentence(i: int) -> str:
    """A text that is unique for `i`, with some characters that are not ASCII."""
    return f"Document {i} of the mill: la rivière n° {i * i} turns the wheel.\n" * (1 + i % 5)


def text_folder(work: Path) -> Path:
    """Makes `texts`, a folder of 60 small files."""
    folder = work / "texts"
    (folder / "deep").mkdir(parents=True)
    for i in range(60):
        (folder / ("deep" if i % 3 else ".") / f"{i}.md").write_text(sentence(i), encoding="utf-8")
    return folder


@pytest.fixture
def texts(work: Path) -> Path:
    return text_folder(work)


def mixed_corpus(work: Path) -> str:
    """Makes files of every local type and a config for them: many map tasks, several shards, 240 documents."""
    text_folder(work)
    rows = [
        json.dumps({"text": sentence(i), "n": i}, ensure_ascii=bool(i % 2)).encode() + b"\n" for i in range(100, 160)
    ]
    (work / "plain.jsonl").write_bytes(b"".join(rows).replace(b"Document 1", b"Document 2"))
    (work / "packed.jsonl.gz").write_bytes(gzip.compress(b"".join(rows), mtime=0))
    pq.write_table(pa.table({"text": [sentence(i) for i in range(300, 360)]}), work / "rows.parquet", row_group_size=7)
    sources = [
        {"path": "texts", "name": "texts"},
        {"path": ["plain.jsonl", "packed.jsonl.gz"], "name": "lines"},
        {"path": "rows.parquet", "name": "rows"},
    ]
    return config_file(work, sources=sources, task_bytes=1500, shard_tokens=5000)


@pytest.fixture
def mixed_config(work: Path) -> str:
    return mixed_corpus(work)


@pytest.fixture(scope="session")
def finished_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with `mixed_corpus` and its `tokens`, made by one worker. Tests must not change it."""
    work = tmp_path_factory.mktemp("finished")
    run_command(work, "--config", mixed_corpus(work), "--workers", "1")
    return work


@pytest.fixture
def finished(work: Path, finished_work: Path) -> Path:
    """The working directory with a copy of `finished_work`."""
    shutil.copytree(finished_work, work, dirs_exist_ok=True)
    return work


def tree(root: Path) -> dict[str, bytes]:
    """Every file below `root`, by relative path."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
