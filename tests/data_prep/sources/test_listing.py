"""Listing of input files: each file once, none that the job wrote, and none of another type unless asked for."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from data_prep.__main__ import main
from data_prep.config.corpus import Source
from data_prep.sources.listing import ResolvedSource, resolve
from data_prep.sources.read_unit import read_unit, wanted_fields
from data_prep.sources.records import TextBatch
from data_prep.sources.units import units
from foundation.errors import ConfigError, DataError
from tests.data_prep.conftest import write_config

LINE = '{"text": "x"}\n'


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(LINE)


def resolved(path: str | list[str], *without: str, **fields: Any) -> ResolvedSource:
    return resolve(Source(path=path, **fields), at="sources.0", without=[Path(p) for p in without])


def names(path: str | list[str], *without: str, **fields: Any) -> list[str]:
    return [file.name for file in resolved(path, *without, **fields).files]


def test_a_file_that_several_paths_match_is_read_once(work: Path) -> None:
    make(work, "d/x.jsonl", "d/y.jsonl")
    for paths in (["d/", "d/x.jsonl"], ["d", "./d/x.jsonl"], ["d/*.jsonl", f"{work}/d/x.jsonl"], ["d//x.jsonl", "d/*"]):
        files = resolved(paths).files
        assert sorted(Path(file.path).name for file in files) == ["x.jsonl", "y.jsonl"], paths


def test_a_glob_skips_the_jobs_own_files_and_hidden_files(work: Path) -> None:
    kept = ["a.jsonl", "d/b.jsonl"]
    make(work, *kept, "tokens/skipped.jsonl", "job/x/c.jsonl", ".git/d.jsonl", "d/.e.jsonl", "tokens2/f.jsonl")
    make(work, "__pycache__/g.jsonl", "d/node_modules/h/i.jsonl")
    own = ("tokens", "job")
    for pattern in ("**/*.jsonl", "**", "*", f"{work}/**/*.jsonl"):
        assert names(pattern, *own) == [*kept, "tokens2/f.jsonl"], pattern
    assert names("*/*.jsonl", *own) == ["d/b.jsonl", "tokens2/f.jsonl"]
    for path in ("tokens", "tokens/*.jsonl", "tok*s/*.jsonl"):
        with pytest.raises(ConfigError, match="the directory is empty"):
            resolved(path, *own)
    assert names("d/node_modules/*/*.jsonl") == ["h/i.jsonl"]
    assert names(".git/*.jsonl") == ["d.jsonl"]  # a hidden directory that is named literally is read


def test_a_directory_that_a_glob_matches_is_read_like_a_named_directory(work: Path) -> None:
    make(work, "c/a.jsonl", "c/2020/b.jsonl", "c/2020/deep/c.jsonl", "c/2020/deep/notes.bin", "c/2020/.d.jsonl")
    (work / "c" / "gone.jsonl").symlink_to("nowhere")
    everything = ["2020/b.jsonl", "2020/deep/c.jsonl", "a.jsonl"]
    assert names("c/*") == names("c") == names("c/**") == everything
    assert names("c/20*") == everything[:2]
    assert names("c/*", type="jsonl") == everything  # notes.bin is in a matched directory, and not matched itself


def test_a_bare_star_selects_by_type_and_a_specific_glob_must_match_one_type(work: Path) -> None:
    make(work, "d/data.jsonl", "d/weights.bin", "d/data.bin")
    assert names("d/*") == ["data.jsonl"]
    with pytest.raises(ConfigError, match=r"1 files that are not jsonl by their names: data\.bin"):
        resolved("d/data*")
    assert names("d/data*", exclude=["*.bin"]) == ["data.jsonl"]
    assert names("d/data*", include=["*.jsonl"]) == ["data.jsonl"]
    assert names("d/data*", type="jsonl") == ["data.bin", "data.jsonl"]
    assert names("d/*", type="jsonl") == ["data.bin", "data.jsonl", "weights.bin"]


def test_a_file_whose_name_contains_glob_characters_is_found_by_its_name(work: Path) -> None:
    make(work, "a[1].jsonl", "a1.jsonl", "d[2]/b.jsonl", "d2/c.jsonl")
    assert names("a[1].jsonl") == ["a[1].jsonl"]
    assert names("a[0-9].jsonl") == ["a1.jsonl"]
    assert names("d[2]") == names("d[2]/*.jsonl") == ["b.jsonl"]


class TokenExpiredError(Exception):
    """A storage's own exception type, not an OSError, as in `botocore` and `aiohttp`."""


class FailingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """An in-memory file system; `fails` names the operation that raises."""

    protocol = "failing"
    fails = ""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("failing://", "memory://")))

    def info(self, path: str, **kwargs: Any) -> Any:
        if self.fails == "info":
            raise TokenExpiredError("ask for a new one")
        return super().info(path, **kwargs)

    def _open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        if self.fails == "open":
            raise TokenExpiredError("ask for a new one")
        file = super()._open(path, *args, **kwargs)
        return UnreadableFile(file.getvalue()) if self.fails == "read" else file


class UnreadableFile(io.BytesIO):
    def read(self, *_: Any) -> bytes:
        raise TokenExpiredError("ask for a new one")

    readinto = read  # type: ignore[assignment]


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    files = fsspec.filesystem("failing")
    monkeypatch.setattr(FailingFileSystem, "fails", "")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def test_urls_are_listed_like_paths(remote: Any) -> None:
    for name in ("a[1].jsonl", "a1.jsonl", "c/a.jsonl", "c/x/b.jsonl", "c/x/node_modules/c.jsonl", "c/w.bin"):
        remote.pipe(f"/b/{name}", LINE.encode())
    assert names("failing://b/a[1].jsonl") == ["a[1].jsonl"]
    assert names("failing://b/a[0-9].jsonl") == ["a1.jsonl"]
    assert names("failing://b/c") == names("failing://b/c/*") == ["a.jsonl", "x/b.jsonl"]
    assert names("failing://b/c/*", type="jsonl") == ["a.jsonl", "w.bin", "x/b.jsonl"]
    assert names("failing://b/?/*.jsonl") == ["c/a.jsonl"]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "txt", "parquet"])
@pytest.mark.parametrize("fails", ["info", "open", "read"])
def test_a_storage_error_is_reported_with_the_url_and_a_remedy(
    remote: Any, work: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, fails: str
) -> None:
    pq.write_table(pa.table({"text": ["x"]}), work / "a.parquet")
    remote.pipe(f"/b/a.{suffix}", (work / "a.parquet").read_bytes() if suffix == "parquet" else LINE.encode())
    source = Source(path=f"failing://b/a.{suffix}")
    (unit,) = units([resolve(source, at="sources.0")], task_bytes=1 << 20)
    if suffix != "jsonl.gz":
        assert any(isinstance(record, TextBatch) for record in read_unit(unit, wanted_fields(source)))
    monkeypatch.setattr(FailingFileSystem, "fails", fails)
    with pytest.raises(
        DataError, match=rf"failing:///b/a\.{suffix} .*TokenExpiredError: ask for a new one\n  try: .*credentials"
    ):
        list(read_unit(unit, wanted_fields(source)))


def test_the_error_for_a_corpus_without_documents_names_the_damaged_files(work: Path, capsys: Any) -> None:
    (work / "a.jsonl.gz").write_bytes(b"not gzip at all")
    (work / "b.jsonl.zst").write_bytes(b"")
    config = write_config(sources=[{"path": ["a.jsonl.gz", "b.jsonl.zst"], "name": "rows"}], max_bad_files=2)
    assert main(["--config", config]) == 2
    error = capsys.readouterr().err
    assert "rows: a.jsonl.gz/a.jsonl.gz: " in error
    assert "rows: b.jsonl.zst/b.jsonl.zst: 0 bytes" in error
    assert sorted(path.name for path in work.iterdir()) == ["a.jsonl.gz", "b.jsonl.zst", "corpus.json"]
