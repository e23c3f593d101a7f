"""Links, loops of links and names of the same file: every file is read once, and what is not read is told."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.config.corpus import Source
from data_prep.sources.listing import ResolvedSource, left_out_line, resolve
from tests.data_prep.conftest import config_file


def listed(**fields: object) -> ResolvedSource:
    return resolve(Source.model_validate(fields), at="sources.0")


def names(source: ResolvedSource) -> list[str]:
    return [file.name for file in source.files]


@pytest.mark.parametrize("loops", [1, 2, 5])
def test_loops_of_links_are_passed_once(loops: int, work: Path) -> None:
    """`glob.glob` finds every file 41 times with one loop, and does not return with two."""
    for folder in ("data", "data/a", "data/a/b"):
        (work / folder).mkdir()
        (work / folder / f"{Path(folder).name}.txt").write_text(folder)
    for i in range(loops):
        (work / ("data/a" if i % 2 else "data/a/b") / f"loop{i}").symlink_to(work / "data")
    found = listed(path="data/**/*.txt")
    assert names(found) == ["a/a.txt", "a/b/b.txt", "data.txt"]
    assert found.left_out["links to directories that are read already"] == loops
    assert names(listed(path="data/**")) == names(found)
    assert names(listed(path="data")) == names(found)


def test_a_linked_directory_is_read_by_a_recursive_glob_and_told_by_a_directory(work: Path) -> None:
    (work / "data").mkdir()
    (work / "elsewhere/deep").mkdir(parents=True)
    (work / "elsewhere/deep/far.txt").write_text("far")
    (work / "data/near.txt").write_text("near")
    (work / "data/link").symlink_to(work / "elsewhere")
    assert names(listed(path="data/**/*.txt")) == ["link/deep/far.txt", "near.txt"]
    plain = listed(path="data")
    assert names(plain) == ["near.txt"]
    assert left_out_line(plain) == "not read in 'data': 1 links to directories (not followed)"


def test_a_file_is_read_once_whatever_its_names(work: Path) -> None:
    """Hard links, links and overlapping globs; a real name is preferred, and then the first."""
    (work / "data").mkdir()
    (work / "data/m.txt").write_text("one")
    os.link(work / "data/m.txt", work / "data/b.txt")
    (work / "data/a.txt").symlink_to("m.txt")
    (work / "data/other.txt").write_text("one")
    found = listed(path=["data/*.txt", "data/**", "data"])
    assert names(found) == ["data/*.txt/b.txt", "data/*.txt/other.txt"]
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
