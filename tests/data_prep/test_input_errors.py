"""Errors in the config and the input: exit code 2, a message with the cause and a remedy, and no output."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import main
from data_prep.config.corpus import changed_fields, load
from data_prep.formats.tokenfile import TokenFile, open_split
from foundation.directory import read_manifest
from tests.data_prep.conftest import cli, run_limited, write_config
from tests.support import refusal_of

BUILDER = {"type": "datasets", "builder": "json", "split": "train"}


def bad_sources() -> list[tuple[dict[str, Any], str]]:
    return [
        ({"path": "nowhere"}, "no such file"),
        ({"path": "hollow"}, "no such file, or the directory is empty"),
        ({"path": "zero"}, "the corpus is empty"),
        ({"path": "blank"}, "no documents with text"),
        ({"path": "one"}, "leave none for 'heldout'"),
        ({"path": "texts", "type": "jsonl"}, "has a name of the type jsonl"),
        ({"path": "texts", "type": "datasets"}, "not a dataset saved with save_to_disk"),
        ({"path": "texts", "id_field": "id"}, "plain text, which has no fields"),
        ({"path": "texts", "messages_field": "messages"}, "plain text, which has no fields"),
        ({"path": "texts", "typ": "text"}, "did you mean 'type'?"),
        ({"path": "texts", "type": "csv"}, "sources.0.type"),
        ({"path": "a.jsonl", "text_field": "body"}, "set text_field of the source to the key that holds the text"),
        ({"path": "a.parquet", "text_field": "body"}, "text, n"),
        ({"path": "a.parquet", "text_field": "n"}, "columns of strings: text"),
        ({"path": "twice.parquet"}, "has 2 columns of this name"),
        ({"path": "cut.parquet"}, "max_bad_files"),
        ({"path": "cut.jsonl.gz"}, "max_bad_files"),
        ({"name": "no path"}, "either a path or a builder"),
        ({"path": "texts", "name": "tokenizer"}, "reserved for the tokenizer"),
        (BUILDER | {"kwargs": {"streaming": True}}, "kwargs.streaming: the data is fetched once and saved"),
        (BUILDER | {"kwargs": {"split": "test"}}, 'name it as "split" of the source'),
    ]


@pytest.fixture
def corpora(work: Path) -> Path:
    for name, text in (("hollow", None), ("zero", ""), ("blank", ""), ("one", "the only document")):
        (work / name).mkdir()
        if text is not None:
            (work / name / "a.txt").write_text(text)
    (work / "blank" / "b.jsonl").write_text('{"text": ""}\n')
    (work / "blank" / "a.txt").unlink()
    (work / "a.jsonl").write_text('{"text": "x"}\n' * 5)
    pq.write_table(pa.table({"text": ["x"], "n": [1]}), work / "a.parquet")
    pq.write_table(pa.table([pa.array(["x"])] * 2, names=["text", "text"]), work / "twice.parquet")
    (work / "cut.parquet").write_bytes((work / "a.parquet").read_bytes()[:-20])
    (work / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 50)[:-9])
    return work


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(("source", "message"), bad_sources(), ids=lambda value: str(value)[:40])
def test_a_bad_source_is_an_error_before_any_work(
    source: dict[str, Any], message: str, corpora: Path, capsys: Any
) -> None:
    """Runs in this process, which is faster than a new one for each source."""
    config = write_config(sources=[source])
    assert main(["--config", config]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "try:" in error
    assert not list(corpora.glob("tokens*"))
    assert not list(corpora.glob(".tokens*"))


@pytest.mark.usefixtures("texts")
def test_a_bad_config_or_output_path_is_an_error(capsys: Any, work: Path) -> None:
    config = write_config()
    (work / "tokens").mkdir()
    for arguments, message in (
        (["--set", "heldout_fraction=1.5"], "at least 0 and below 1"),
        (["--set", "shard_tokenz=5"], "did you mean 'shard_tokens'?"),
        (["--set", "tokenizer.path=x"], "either"),
        (["--set", "tokenizer.vocab_size=299"], "at least 300"),
        (["--set", "output=corpus.json/tokens"], "corpus.json is not a directory"),
        (["--workers", "0"], "1 or more"),
        (["phase", "map", "--task", "2", "--of", "2"], "from 0 to 1"),
        ([], "tokens has no manifest.json"),
    ):
        assert main([*arguments, "--config", config]) == 2
        error = capsys.readouterr().err
        assert message in error, error
    (work / "tokens").rmdir()
    assert main(["finish", "--config", config]) == 2
    assert "no prepared job" in capsys.readouterr().err
    assert sorted(path.name for path in work.iterdir()) == ["corpus.json", "texts"]


def test_bad_records_of_all_tasks_are_listed_and_skipped_up_to_the_limit(work: Path) -> None:
    for i in range(4):
        rows = [json.dumps({"text": f"file {i}, row {j}"}) for j in range(30)]
        rows[20] = rows[20][:-4]  # a truncated line in each of four map tasks
        (work / f"{i}.jsonl").write_text("\n".join(rows))
    config = write_config(sources=[{"path": "*.jsonl", "name": "rows"}], task_bytes=700, max_bad_records=3)
    error = cli("--config", config, code=2).stderr
    assert "4 unreadable records so far, max_bad_records is 3" in error
    assert "rows: 1.jsonl:21: not JSON" in error
    assert "set max_bad_records to 4" in error
    assert not (work / "tokens").exists()
    again = cli("--config", config, "--set", "max_bad_records=4")
    assert "4 of 4 map tasks were finished before" in again.stderr  # raising the limit costs no work
    manifest = read_manifest(work / "tokens", kind="tokens")
    assert manifest.details["skipped"] == {"not JSON": 4}
    listed = [json.loads(line) for line in (work / "tokens" / "skipped.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["at"], entry["reason"]) for entry in listed] == [
        (f"{i}.jsonl", 21, "not JSON") for i in range(4)
    ]
    splits = manifest.details["splits"]
    assert splits["train"]["documents"] + splits["heldout"]["documents"] == 4 * 29


def test_a_task_with_more_bad_records_than_the_limit_stops_the_job(work: Path) -> None:
    (work / "t").mkdir()
    for i in range(80):
        (work / "t" / f"{i:02d}.txt").write_bytes(b"\xff" if i >= 60 else b"fine %d" % i)
    config = write_config(sources=[{"path": "t"}], max_bad_records=2)
    error = cli("--config", config, code=2).stderr
    assert "3 unreadable records so far, max_bad_records is 2" in error  # stopped at the third of 20
    assert "t: 60.txt:1: not UTF-8" in error


@pytest.mark.usefixtures("texts")
def test_a_damaged_file_is_read_up_to_the_damage_if_the_config_allows_it(work: Path) -> None:
    (work / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 50)[:-9])
    config = write_config(sources=[{"path": "texts"}, {"path": "cut.jsonl.gz"}], max_bad_files=1)
    cli("--config", config)
    manifest = read_manifest(work / "tokens", kind="tokens")
    assert manifest.details["skipped"]["damaged file"] == 1


def test_more_damaged_files_than_the_limit_stop_the_job_and_are_named(work: Path) -> None:
    for name in ("a", "b", "c"):
        (work / f"{name}.jsonl.gz").write_bytes(gzip.compress(b'{"text": "%s"}\n' % name.encode() * 50)[:-9])
    (work / "d.jsonl").write_text('{"text": "d"}\n' * 300)
    config = write_config(sources=[{"path": ["d.jsonl", "*.jsonl.gz"], "name": "cut"}], max_bad_files=1)
    error = cli("--config", config, code=2).stderr
    assert "2 unreadable files so far, max_bad_files is 1" in error
    assert "a.jsonl.gz: damaged file" in error
    assert not (work / "tokens").exists()


def test_cleaning_and_line_deduplication_of_conversations_are_errors(work: Path) -> None:
    (work / "talk.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "write to a@b.com"}]}))
    sources = [{"path": "talk.jsonl", "messages_field": "messages"}]
    for fields, which in (({"clean": [{"step": "pii"}]}, "clean"), ({"dedup": {"lines": {}}}, "dedup.lines")):
        error = cli("--config", write_config(sources=sources, **fields), code=2).stderr
        assert f"{which} applies to plain texts only, and source 'talk.jsonl' holds conversations" in error


@pytest.mark.usefixtures("texts")
def test_a_full_disk_is_an_error_and_the_run_resumes(work: Path) -> None:
    """A limit on the file size simulates a full disk: both are an OSError in the middle of a write."""
    (work / "texts" / "large.txt").write_text("la rivière " * 30_000)
    config = write_config()
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, 100_000))
    said = refusal_of(run_limited(full, "--config", config))
    assert "finished tasks are kept" in said
    assert not (work / "tokens").exists()
    assert "training" not in cli("--config", config).stderr  # the tokenizer was finished


def test_a_killed_worker_is_named_and_the_run_resumes(work: Path) -> None:
    (work / "t").mkdir()
    for i in range(12):
        (work / "t" / f"{i}.txt").write_text(f"{i} la rivière " * 20_000)
    config = write_config(sources=[{"path": "t"}], task_bytes=5_000_000, heldout_fraction=0.5)
    process = subprocess.Popen(
        [sys.executable, "-m", "data_prep", "--config", config, "--workers", "1"], stderr=subprocess.PIPE, text=True
    )
    while not list(work.glob(".tokens.job/map/.*.partial")):
        assert process.poll() is None
        time.sleep(0.01)
    (worker,) = grandchildren(process.pid)
    os.kill(worker, signal.SIGKILL)
    _, error = process.communicate()
    assert process.returncode == 76  # another try may help
    assert "the worker of map task 0 was killed by SIGKILL" in error
    cli("--config", config)


def grandchildren(pid: int) -> list[int]:
    """Workers: children of the fork server, which is a child of the coordinator."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
    return [child for child, parent in parents.items() if parents.get(parent) == pid]


@pytest.mark.usefixtures("texts")
def test_an_output_that_is_a_file_is_refused(work: Path) -> None:
    (work / "taken.txt").write_text("mine")
    error = cli("--config", write_config(), "--set", "output=taken.txt", code=2).stderr
    assert "output = 'taken.txt'" in error
    assert "choose another output" in error
    assert (work / "taken.txt").read_text() == "mine"


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output": "file:///tmp/tokens"}, "use /tmp/tokens"),
        ({"output": "x" * 246}, "at most 245 bytes"),
        ({"output": "link"}, "a symbolic link to nowhere/at/all"),
        ({"output": "file/tokens"}, "file is not a directory"),
        ({"prepend_bos": True}, "set tokenizer.bos_token"),
    ],
)
def test_an_output_that_could_not_get_its_name_is_refused_first(
    fields: dict[str, Any], message: str, work: Path, capsys: Any
) -> None:
    """And a trained tokenizer without the BOS that documents begin with: nothing is read, trained or written."""
    (work / "link").symlink_to("nowhere/at/all")
    (work / "file").touch()
    before = sorted(work.rglob("*"))
    config = write_config(**fields)
    assert main(["--config", config]) == 2
    assert message in capsys.readouterr().err
    assert sorted(work.rglob("*")) == sorted([*before, work / config])


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize("kind", ["bpe", "sentencepiece-bpe"])
def test_a_trained_tokenizer_has_the_bos_that_documents_begin_with(kind: str, work: Path) -> None:
    """`bos_token` is in the folder that `AutoTokenizer` reads, and every document begins with its id."""
    tokenizer = {"train": kind, "vocab_size": 400, "bos_token": "<s>"}
    assert main(["--config", write_config(tokenizer=tokenizer, prepend_bos=True), "--workers", "1"]) == 0
    manifest = read_manifest(work / "tokens", kind="tokens")
    bos = manifest.details["tokenizer"]["bos_id"]
    names = json.loads((work / "tokens/tokenizer/tokenizer_config.json").read_text())
    assert names["bos_token"] == "<s>"
    prefixes, _ = open_split(work / "tokens", split="train")
    tokens = TokenFile.open(prefixes[0])
    first = tokens.tokens[tokens.byte_offsets // tokens.dtype.itemsize]
    assert bos is not None
    assert set(first.tolist()) == {bos}
    assert (tokens.tokens == bos).sum() == tokens.documents


@pytest.mark.usefixtures("work")
def test_keys_at_their_defaults_do_not_change_the_identity_of_a_job() -> None:
    """Jobs and outputs of versions that did not have these keys are still taken as made by the same config."""
    plain = load(write_config()).identity()
    assert "max_record_bytes" not in plain
    assert "bos_token" not in plain["tokenizer"]
    changed = load(write_config(max_record_bytes=1000)).identity()
    assert changed_fields(changed, plain) == ["config.max_record_bytes"]


def test_a_field_that_was_corrected_needs_no_removal_of_what_the_mistake_left(work: Path) -> None:
    lines = [json.dumps({"content": f"mill {n} turns the wheel {n * 7} times"}) for n in range(400)]
    (work / "a.jsonl").write_text("\n".join(lines))
    config = {"output": str(work / "out"), "tokenizer": {"train": "bpe", "vocab_size": 300}}
    path = work / "c.json"
    for field, code in (("text", 2), ("content", 0)):
        source = {"path": str(work / "a.jsonl"), "text_field": field}
        path.write_text(json.dumps({**config, "sources": [source]}))
        assert main(["--config", str(path), "--workers", "1"]) == code
