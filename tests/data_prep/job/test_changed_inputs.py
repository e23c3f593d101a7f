"""Inputs that change while a job is stopped: equal bytes are taken, other bytes refused, and files are named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from foundation.errors import DataError
from tests.data_prep.conftest import mixed_corpus, tree
from tests.data_prep.in_process import run_job
from tests.support import flip_a_byte


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
