"""Files that are damaged and inputs that change between a job's tasks: found when they are read, named, refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_prep.__main__ import main
from data_prep.config.corpus import load
from data_prep.job import prepare
from data_prep.job.directory import Job
from data_prep.task import atomic_directory
from foundation.directory import sync, write_json
from foundation.errors import DataError
from tests.data_prep.conftest import config_file, mixed_corpus, text_folder, tree
from tests.data_prep.in_process import run_job
from tests.support import flip_a_byte

CONFIG = {"task_bytes": 2000, "shard_tokens": 2000, "tokenizer": {"train": "bpe", "vocab_size": 300}}


@pytest.fixture(scope="module")
def mapped_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("mapped")
    text_folder(work)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        run_job(config_file(work, **CONFIG), until="map")
        shutil.copytree(work / ".tokens.job", work / "kept")
        run_job("corpus.json")
        (work / "kept").rename(work / ".tokens.job")
        (work / "tokens").rename(work / "expected")
    return work


@pytest.fixture
def mapped(mapped_work: Path, work: Path) -> Path:
    """A copy of `mapped_work` in the working directory; `expected` is what the job makes."""
    shutil.copytree(mapped_work, work, dirs_exist_ok=True)
    return work


@pytest.mark.parametrize("at", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("name", ["run-000/tokens.bin", "run-000/docs.bin", "run-000/checks.bin", "run-000/run.json"])
def test_a_flipped_bit_in_a_finished_map_output_is_found_and_its_task_named(name: str, at: float, mapped: Path) -> None:
    """Whatever the reduce tasks read is compared with checksums; after the named task is repeated, the output is as if
    nothing had happened."""
    directory = mapped / ".tokens.job/map/00001"
    flip_a_byte(directory / name, at=at)
    with pytest.raises(DataError, match=r"rm -r .*map/00001 and run again") as raised:
        run_job("corpus.json")
    assert "damaged" in str(raised.value)
    shutil.rmtree(directory)
    run_job("corpus.json")
    assert tree(mapped / "tokens") == tree(mapped / "expected")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b'{"runs": 1}'])
@pytest.mark.parametrize("file", ["job.json", "plan.json", "map/00001/done.json", "map/00001/run-000/run.json"])
def test_a_damaged_file_of_the_job_directory_is_an_error_with_a_remedy(
    file: str, damage: bytes, mapped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mapped / ".tokens.job" / file).write_bytes(damage)
    assert main(["--config", "corpus.json", "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert "damaged" in error
    assert "rm -r" in error


@pytest.mark.parametrize("arguments", [[], ["prepare"], ["status"], ["phase", "map", "--task", "0", "--of", "1"]])
def test_a_missing_plan_is_an_error(arguments: list[str], mapped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mapped / ".tokens.job/plan.json").unlink()
    assert main([*arguments, "--config", "corpus.json"]) == 2
    assert re.search(r"plan.json is damaged(.|\n)*rm -r .tokens.job", capsys.readouterr().err)


def test_runs_without_checksums_are_read(mapped: Path) -> None:
    """A job that an older version has begun can be resumed."""
    for run in mapped.glob(".tokens.job/map/*/run-*"):
        (run / "checks.bin").unlink()
        summary = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({key: summary[key] for key in ("documents", "groups")}))
    run_job("corpus.json")
    assert tree(mapped / "tokens") == tree(mapped / "expected")


def test_the_job_directory_of_a_changed_config_is_told_from_a_damaged_one(mapped: Path) -> None:
    config_file(mapped, **CONFIG, seed=9)
    with pytest.raises(DataError, match=r"config\.seed"):
        prepare.inspect(load("corpus.json")).job.check_identity(
            prepare.inspect(load("corpus.json")).identity, Job(load("corpus.json")).saved_identity() or {}
        )


def test_the_plan_and_its_folders_are_flushed_before_job_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").mkdir()
    for i in range(200):
        (tmp_path / "text" / f"{i}.txt").write_text(f"mill {i} water turns the wheel " * 3)
    config = tmp_path / "c.json"
    tokenizer = {"train": "bpe", "vocab_size": 300}
    sources = [{"path": str(tmp_path / "text")}]
    config.write_text(json.dumps({"output": str(tmp_path / "tokens"), "sources": sources, "tokenizer": tokenizer}))
    order: list[str] = []

    def recorded_sync(path: Path) -> None:
        order.append(f"flush {path.name}")
        sync(path)

    def recorded_write(path: Path, value: Any) -> None:
        order.append(f"write {path.name}")
        write_json(path, value)

    monkeypatch.setattr("data_prep.job.directory.sync", recorded_sync)
    monkeypatch.setattr("data_prep.job.directory.write_json", recorded_write)
    run_job(str(config), until="map")
    before = order[: order.index("write job.json")]
    assert before[:3] == ["flush .plan.json.partial", "flush out", "flush .tokens.job"]
    assert order[len(before) + 1] == "flush .tokens.job"


def test_the_files_of_a_task_are_flushed_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, flushed = tmp_path / "map-00000", list[tuple[str, bool]]()
    monkeypatch.setattr("data_prep.task.sync", lambda path: flushed.append((path.name, final.exists())))
    with atomic_directory(final) as scratch:
        (scratch / "done.json").write_text("{}")
    assert flushed == [("done.json", False), (scratch.name, False), (tmp_path.name, True)]


@pytest.fixture(scope="module")
def half_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped job: every second map task has finished. `expected` is its output without a stop."""
    work = tmp_path_factory.mktemp("half")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        config = mixed_corpus(work)
        run_job(config, until="map")
        shutil.copytree(work / ".tokens.job", work / "kept")
        run_job(config)
        (work / "tokens").rename(work / "expected")
        for i, directory in enumerate(sorted((work / "kept/map").iterdir())):
            if i % 2:
                shutil.rmtree(directory)
        (work / "kept").rename(work / ".tokens.job")
    return work


@pytest.fixture
def half(half_work: Path, work: Path) -> Path:
    """A copy of `half_work` in the working directory; all files keep their times."""
    shutil.copytree(half_work, work, dirs_exist_ok=True)
    return work


def inputs(work: Path) -> list[Path]:
    records = [work / name for name in ("plain.jsonl", "packed.jsonl.gz", "rows.parquet")]
    return [*sorted((work / "texts").rglob("*.md")), *records]


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1 + path.stat().st_mtime_ns))


def test_restored_files_with_equal_bytes_are_taken(half: Path) -> None:
    for path in inputs(half):
        touch(path)
    run_job("corpus.json")
    assert tree(half / "tokens") == tree(half / "expected")


@pytest.mark.parametrize("number", [0, 31, -3, -2, -1])
def test_a_changed_byte_in_what_was_read_is_refused(number: int, half: Path) -> None:
    """All files are read for the tokenizer; of some, a map task has finished, too."""
    path = inputs(half)[number]
    flip_a_byte(path)
    touch(path)
    with pytest.raises(DataError, match=f"{path.name} has changed since the job was planned: it has other bytes"):
        run_job("corpus.json")


def test_without_a_record_of_what_was_read_a_restored_file_is_refused(half: Path) -> None:
    """As in jobs that an older version has begun."""
    (half / ".tokens.job/tokenizer/pieces.json").unlink()
    touch(half / "plain.jsonl")
    with pytest.raises(DataError, match="the content that was read is not known"):
        run_job("corpus.json")


@pytest.mark.parametrize("finished", [True, False])
def test_the_files_that_differ_are_named(finished: bool, half: Path) -> None:
    if finished:
        shutil.rmtree(half / ".tokens.job")
        (half / "expected").rename(half / "tokens")
    (half / "texts/new.md").write_text("new")
    (half / "texts/3.md").unlink()
    with (half / "plain.jsonl").open("a") as file:
        file.write("{}")
    size = (half / "plain.jsonl").stat().st_size
    with pytest.raises(DataError) as raised:
        run_job("corpus.json")
    for line in (
        "1 added: texts: new.md",
        "1 removed: texts: 3.md",
        f"1 of another size: lines: plain.jsonl/plain.jsonl (had {size - 2:,} bytes, has {size:,})",
    ):
        assert line in str(raised.value)
