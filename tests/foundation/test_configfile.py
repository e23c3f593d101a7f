"""Config files in JSON and YAML: extends, overrides, and what is refused with which words."""

from __future__ import annotations

import json
import pickle
import subprocess
from pathlib import Path

import pytest

from foundation import configfile
from foundation.errors import ConfigError
from foundation.section import Count, Section, parse


class Inner(Section):
    depth: Count = 1


class Outer(Section):
    inner: Inner = Inner()
    items: tuple[int, ...] = ()
    ratio: float = 0.5


def write(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "base.json": {"a": {"x": 1, "y": 2}, "list": [1, 2]},
                "child.json": {"extends": "base.json", "a": {"y": 3}, "list": [9]},
            },
            {"a": {"x": 1, "y": 3}, "list": [9]},
        ),
        (
            {"one.json": {"a": 1, "b": 1}, "two.json": {"b": 2}, "child.json": {"extends": ["one.json", "two.json"]}},
            {"a": 1, "b": 2},
        ),
        (
            {
                "base.json": '{"a": {"x": 1, "y": 2}, /* c */ "b": 1}',
                "middle.yaml": "extends: base.json\na: {y: 3}\n",
                "child.json": {"extends": "middle.yaml", "b": 2},
            },
            {"a": {"x": 1, "y": 3}, "b": 2},
        ),
        (
            {"base.json": {"$schema": "x.json", "a": 1}, "child.json": {"$schema": "y.json", "extends": "base.json"}},
            {"a": 1},
        ),
    ],
    ids=[
        "objects key by key, lists as a whole",
        "the later of several bases wins",
        "formats mixed",
        "an editor's schema",
    ],
)
def test_extends(tmp_path: Path, files: dict[str, object], expected: dict[str, object]) -> None:
    paths = [write(tmp_path / name, content) for name, content in files.items()]
    assert configfile.load(paths[-1]) == expected


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.json", {"extends": "b.json"})
    write(tmp_path / "b.json", {"extends": "a.json"})
    with pytest.raises(ConfigError, match=r"a\.json -> b\.json -> a\.json"):
        configfile.load(tmp_path / "a.json")


def test_an_error_survives_the_way_between_ranks() -> None:
    error = ConfigError("run.dir", "x", why="because", remedy="try y")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_set_overrides_a_nested_field_with_json_or_text(tmp_path: Path) -> None:
    path = write(tmp_path / "c.json", {"run": {"steps": 1}, "sources": [{"path": "x"}]})
    loaded = configfile.load(path, ["run.steps=100", "run.dir=runs/a=b", "sources.0.path=y", "new.flag=true"])
    assert loaded == {"run": {"steps": 100, "dir": "runs/a=b"}, "sources": [{"path": "y"}], "new": {"flag": True}}


@pytest.mark.parametrize(
    ("override", "words"),
    [("run.steps", "no '='"), ("run.steps.deep=1", "run.steps is not an object"), ("sources.3.path=y", "no index")],
)
def test_an_override_that_leads_nowhere_is_refused(tmp_path: Path, override: str, words: str) -> None:
    path = write(tmp_path / "c.json", {"run": {"steps": 1}, "sources": [{"path": "x"}]})
    with pytest.raises(ConfigError, match=words):
        configfile.load(path, [override])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"run": {"steps": 1, "steps": 2}}', r"steps = 2\n.*twice"),
        ('{"a": 1, // x\n "a": 2}', "twice"),
        ('{\n "a": 1\n "b": 2}', "line 3, column 2"),
        ('{ // x\n "a": 1,\n "b" 2}', "line 3, column 6"),
        ('{"extends": 5}', "extends = 5"),
    ],
)
def test_json_that_cannot_be_a_config_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configfile.load(write(tmp_path / "c.json", text))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zero3.json/inner.json", "Not a directory"),
        ("zero4.json", r"files there: zero3\.json"),
        ("", "it is a directory"),
    ],
)
def test_a_path_without_a_file_is_refused_in_words(tmp_path: Path, name: str, words: str) -> None:
    write(tmp_path / "zero3.json", {})
    with pytest.raises(ConfigError, match=words):
        configfile.load(tmp_path / name)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"inner": {"dept": 3}}, r"inner\.dept = 3\n.*no such key\n.*did you mean 'depth'"),
        ({"inner": {"depth": "three"}, "ration": 1}, "did you mean 'ratio'"),  # before what follows from the typo
        ({"inner": {"depth": "3"}}, r"inner\.depth = '3'"),
        ({"inner": {"depth": 1.5}}, r"inner\.depth = 1\.5"),
    ],
)
def test_an_unknown_key_or_a_value_of_another_type_is_refused(value: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(Outer, value)


def test_a_count_may_be_written_with_an_exponent() -> None:
    assert parse(Outer, {"inner": {"depth": 5e8}}).inner.depth == 500_000_000


def test_comments_and_trailing_commas_are_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "c.json", '{\n  // a comment\n  "a": 40e9, /* another */\n  "b": [1, 2,],\n}')
    assert configfile.load(path) == {"a": 40e9, "b": [1, 2]}


def test_yaml_numbers_and_words_are_read_as_in_json(tmp_path: Path) -> None:
    text = """
    lr: 1e-4              # a string in YAML 1.1
    big: 40e9
    steps: 1_000          # a number in YAML 1.1, text in 1.2
    words: [no, off, yes, on, y, N, 2024-01-01, 1:30, "5"]
    constants: [true, false, null, ~, 007, 0x10, 0o17, .5, -1.5e3, +1]
    nothing:
    """
    assert configfile.load(write(tmp_path / "c.yaml", text)) == {
        "lr": 1e-4,
        "big": 40e9,
        "steps": "1_000",
        "words": ["no", "off", "yes", "on", "y", "N", "2024-01-01", "1:30", "5"],
        "constants": [True, False, None, None, 7, 16, 15, 0.5, -1500.0, 1],
        "nothing": None,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2", r"c = 2\n.*twice.*line 4"),
        ("1: x", "keys are text"),
        ("<<: {a: 1}", "extends"),
        ("a: [1,\nb: 2", "line 2, column"),
        ("a: 1\n\tb: 2", "line 2, column 1"),
        ("a: *nowhere", "line 1, column 4"),
        ("a: !!python/object:os.system x", "not YAML"),
        ("a: 1\n---\na: 2", "line 2"),
        ("- 1", "holds a list, not an object"),
        ("", "holds nothing, not an object"),
    ],
)
def test_yaml_that_cannot_be_a_config_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configfile.load(write(tmp_path / "c.yaml", text))


def test_a_shipped_config_is_found_by_its_name_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert configfile.load("ds_configs/zero1.json")["zero_optimization"] == {"stage": 1}
    (tmp_path / "ds_configs").mkdir()
    write(tmp_path / "ds_configs" / "zero1.json", {"own": True})
    assert configfile.load("ds_configs/zero1.json") == {"own": True}
    with pytest.raises(ConfigError, match="no such file"):
        configfile.load("../ds_configs/zero1.json")


def test_whole_numbers_may_be_written_with_an_exponent_in_any_field() -> None:
    class Plain(Section):
        count: int = 1
        ratio: float = 1.0
        anything: dict[str, object] | None = None

    parsed = parse(Plain, {"count": 40e9, "ratio": 2.0, "anything": {"theta": 1e4}})
    assert (parsed.count, type(parsed.count)) == (40_000_000_000, int)
    assert type(parsed.ratio) is float
    assert type((parsed.anything or {})["theta"]) is float  # what a field does not describe stays as it is


def shell(remedy: str, cwd: Path) -> None:
    """Types the command of a remedy."""
    subprocess.run(remedy.partition(", and give")[0], shell=True, check=True, cwd=cwd)


def test_yaml_under_a_name_of_json_is_named_and_read_after_the_remedy(tmp_path: Path) -> None:
    path = write(tmp_path / "c.json", "run:\n  steps: 5\n")
    with pytest.raises(ConfigError, match="it is YAML under a name of JSON") as refused:
        configfile.load(path)
    shell(refused.value.remedy, tmp_path)
    assert configfile.load(tmp_path / "c.yaml") == {"run": {"steps": 5}}
    with pytest.raises(ConfigError, match="not JSON"):
        configfile.load(write(tmp_path / "d.json", '{"run": {"steps": 5}'))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_utf_16_is_named_and_the_mark_of_utf_8_is_read(encoding: str, tmp_path: Path) -> None:
    path, expected = tmp_path / "c.json", {"a": "é"}
    path.write_bytes(("\ufeff" * (encoding == "utf-16-be") + '{"a": "é"}').encode(encoding))
    if encoding == "utf-8-sig":
        assert configfile.load(path) == expected
        return
    with pytest.raises(ConfigError, match="it is text in UTF-16, not in UTF-8") as refused:
        configfile.load(path)
    shell(refused.value.remedy, tmp_path)
    assert configfile.load(tmp_path / "utf8-c.json") == expected
