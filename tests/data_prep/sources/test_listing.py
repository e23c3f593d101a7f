"""Listing of input files: each file once, whatever links lead there, none that the job wrote, no other type."""

from __future__ import annotations

import io
import json
import os
import socket
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
from data_prep.sources.listing import ResolvedSource, left_out_line, resolve
from data_prep.sources.read_unit import read_unit, wanted_fields
from data_prep.sources.records import TextBatch
from data_prep.sources.units import units
from foundation.errors import ConfigError, DataError
from tests.data_prep.conftest import cli, config_file, write_config

LINE = '{"text": "x"}\n'


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(LINE)


def resolved(path: str | list[str], *without: str, **fields: Any) -> ResolvedSource:
    return resolve(Source(path=path, **fields), at="sources.0", without=[Path(p) for p in without])


def names(path: str | list[str], *without: str, **fields: Any) -> list[str]:
    return names_in(resolved(path, *without, **fields))


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


def names_in(source: ResolvedSource) -> list[str]:
    return [file.name for file in source.files]


@pytest.mark.parametrize("loops", [1, 2, 5])
def test_loops_of_links_are_passed_once(loops: int, work: Path) -> None:
    """`glob.glob` finds every file 41 times with one loop, and does not return with two."""
    for folder in ("data", "data/a", "data/a/b"):
        (work / folder).mkdir()
        (work / folder / f"{Path(folder).name}.txt").write_text(folder)
    for i in range(loops):
        (work / ("data/a" if i % 2 else "data/a/b") / f"loop{i}").symlink_to(work / "data")
    found = resolved("data/**/*.txt")
    assert names_in(found) == ["a/a.txt", "a/b/b.txt", "data.txt"]
    assert found.left_out["links to directories that are read already"] == loops
    assert names("data/**") == names_in(found)
    assert names("data") == names_in(found)


def test_a_linked_directory_is_read_by_a_recursive_glob_and_told_by_a_directory(work: Path) -> None:
    (work / "data").mkdir()
    (work / "elsewhere/deep").mkdir(parents=True)
    (work / "elsewhere/deep/far.txt").write_text("far")
    (work / "data/near.txt").write_text("near")
    (work / "data/link").symlink_to(work / "elsewhere")
    assert names("data/**/*.txt") == ["link/deep/far.txt", "near.txt"]
    plain = resolved("data")
    assert names_in(plain) == ["near.txt"]
    assert left_out_line(plain) == "not read in 'data': 1 links to directories (not followed)"


def test_a_file_is_read_once_whatever_its_names(work: Path) -> None:
    """Hard links, links and overlapping globs; a real name is preferred, and then the first."""
    (work / "data").mkdir()
    (work / "data/m.txt").write_text("one")
    os.link(work / "data/m.txt", work / "data/b.txt")
    (work / "data/a.txt").symlink_to("m.txt")
    (work / "data/other.txt").write_text("one")
    found = resolved(["data/*.txt", "data/**", "data"])
    assert names_in(found) == ["data/*.txt/b.txt", "data/*.txt/other.txt"]
    assert "other names of the same file" in str(left_out_line(found))


@pytest.mark.parametrize("command", ["plan", "prepare"])
def test_what_is_not_chosen_is_told_in_one_line(command: str, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "texts").mkdir()
    for i in range(40):
        (work / f"texts/{i}.txt").write_text(f"text {i}")
    for name in ("a.json", "b.json", "c.jsonl.sz", "d.tar.xz", ".hidden", "draft.log"):
        (work / "texts" / name).write_text("{}")
    os.mkfifo(work / "texts/pipe.txt")
    (work / "texts/dangling.txt").symlink_to("nothing")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("texts/socket.txt")
    sources = [{"path": "texts", "exclude": ["*.log"]}]
    assert main([command, "--config", config_file(work, sources=sources)]) == 0
    told = "not read in 'texts': 2 pipes, sockets and devices, 2 *.json, 1 links to nothing, 1 *.sz, 1 *.xz\n"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(("name", "comma"), [("a.csv", ","), ("a.tsv", "\t")])
def test_a_table_is_refused_with_the_source_that_reads_it(name: str, comma: str, work: Path) -> None:
    rows = "".join(f"wheel {i} turns{comma}{i}\n" for i in range(60))
    (work / name).write_text(f"words{comma}n\n{rows}")
    with pytest.raises(ConfigError, match="read by the library datasets") as refused:
        resolved(name, text_field="words")
    source = json.loads(refused.value.remedy.partition(", with the column")[0])
    cli("--config", write_config(sources=[source], tokenizer={"train": "bpe", "vocab_size": 300}))
    splits = json.loads((work / "tokens/manifest.json").read_text())["details"]["splits"]
    assert sum(split["documents"] for split in splits.values()) == 60
