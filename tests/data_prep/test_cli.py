"""The command line: fast help, no import of torch, and a summary of the output."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from foundation.directory import read_manifest
from tests.data_prep.conftest import cli, write_config


def started(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m data_prep ...` in a process of its own, with the imports that it does itself."""
    command = [sys.executable, "-m", "data_prep", *arguments]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=True)


@pytest.mark.usefixtures("work")
def test_help_is_printed_in_less_than_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = started("--help").stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # of CPU time, which does not depend on other processes
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
    for word in ("plan", "status", "prepare", "phase", "finish", "verify", "stats", "--workers", "--set"):
        assert word in text
    assert "--task" in cli("phase", "--help").stdout


@pytest.mark.usefixtures("texts")
def test_no_process_of_a_run_imports_torch() -> None:
    trace = started("--config", write_config(), PYTHONPROFILEIMPORTTIME="1").stderr
    modules = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in trace.splitlines() if line.count("|") == 2}
    assert {"tokenizers", "numpy", "data_prep"} <= modules
    assert not modules & {"torch", "transformers", "datasets", "pipeline"}


def test_the_summary_has_the_counts_of_the_output_and_the_skipped_records(texts: Path, work: Path) -> None:
    (texts / "empty.md").write_text("")
    text = cli("--config", write_config()).stdout
    splits = read_manifest(work / "tokens", kind="tokens").details["splits"]
    for split in ("train", "heldout"):
        entry = splits[split]
        ratio = entry["bytes"] / entry["tokens"]
        assert f"{split}: {entry['documents']} documents, {entry['tokens']:,} tokens, {ratio:.3f} bytes/token" in text
    assert "skipped: 1 empty" in text
    assert "MB/s" in text


def test_the_inputs_are_recorded_with_their_checksums(finished: Path) -> None:
    manifest = read_manifest(finished / "tokens", kind="tokens")
    assert set(manifest.parents) == {"texts", "lines", "rows"}
    assert manifest.parents["texts"]["files"] == 60
    assert "output" not in manifest.config
    lines = [json.loads(line) for line in (finished / "tokens" / "sources.jsonl").read_text().splitlines()]
    assert len(lines) == 63
    assert {line["parts"] for line in lines if line["source"] == "texts"} == {1}


def test_the_path_of_the_corpus_is_not_part_of_the_fingerprint(work: Path, texts: Path) -> None:
    cli("--config", write_config())
    texts.rename(work / "elsewhere")
    cli("--config", write_config(sources=[{"path": "elsewhere", "name": "texts"}], output="again"))
    one, two = (read_manifest(work / name, kind="tokens") for name in ("tokens", "again"))
    assert one.fingerprint == two.fingerprint
    assert one.parents["texts"]["fingerprint"] == two.parents["texts"]["fingerprint"]


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize("kind", ["sentencepiece-unigram"])
def test_a_sentencepiece_tokenizer_keeps_its_model_and_appends_its_eos(kind: str) -> None:
    cli("--config", write_config(tokenizer={"train": kind, "vocab_size": 420}))
    entry = read_manifest("tokens", kind="tokens").details["tokenizer"]
    assert (entry["kind"], entry["eos_id"]) == (kind, 1)
    assert Path("tokens/tokenizer/tokenizer.model").is_file()


@pytest.mark.usefixtures("texts")
def test_without_append_eos_no_document_ends_with_it() -> None:
    from data_prep.formats.tokenfile import TokenFile, shard_prefix  # noqa: PLC0415

    cli("--config", write_config(append_eos=False))
    assert 0 not in TokenFile.open(shard_prefix(Path("tokens"), "train", 0)).tokens


def test_the_data_of_a_builder_is_fetched_once_and_read_like_a_saved_dataset(work: Path) -> None:
    (work / "rows.json").write_text("\n".join(json.dumps({"text": f"row {i}"}) for i in range(60)))
    source = {
        "type": "datasets",
        "builder": "json",
        "split": "train",
        "name": "built",
        "kwargs": {"data_files": "rows.json", "cache_dir": "cache"},
    }
    config = write_config(sources=[source])
    cli("prepare", "--config", config)
    (work / "rows.json").unlink()  # the fetched data is kept
    cli("--config", config)
    splits = read_manifest(work / "tokens", kind="tokens").details["splits"]
    assert splits["train"]["documents"] + splits["heldout"]["documents"] == 60
    assert "exists already" in cli("--config", config).stdout


@pytest.mark.usefixtures("texts")
def test_file_names_that_are_not_valid_utf_8_are_accepted(texts: Path) -> None:
    Path(os.fsdecode(os.fsencode(texts) + b"/caf\xe9.md")).write_text("le moulin")
    cli("--config", write_config())
    assert "caf\\udce9.md" in Path("tokens/sources.jsonl").read_text()
    assert "exists already" in cli("--config", "corpus.json").stdout


def test_commands_run_again_after_the_end_have_nothing_to_do(finished: Path) -> None:
    """As when a scheduler runs a finished array task a second time."""
    assert finished
    for command in (["prepare"], ["phase", "map", "--task", "0", "--of", "2"], ["finish"]):
        assert "exists already" in cli(*command, "--config", "corpus.json").stdout


def test_a_closed_pipe_ends_without_a_traceback(work: Path) -> None:
    process = subprocess.Popen(
        f"{sys.executable} -m data_prep --config {write_config()} | true", shell=True, cwd=work, stderr=subprocess.PIPE
    )
    assert b"Traceback" not in process.communicate()[1]
