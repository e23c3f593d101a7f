"""A URL where a path is meant is refused by every key, every argument and every writer; never taken as a folder."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foundation import configfile
from foundation.command_line import Parser, execute
from foundation.config_kinds import KINDS, keys
from foundation.directory import fresh_staging
from foundation.errors import ConfigError, RefusedValueError
from foundation.paths import PathArgument, is_url, local_path
from foundation.section import problems_of
from foundation.verbs import VERBS
from headrace.commands.app import run

URL = "s3://bucket/run"
NO_PATHS = {
    "model.path",  # folders are copied from URLs, heldout tokens read, outputs uploaded
    "model",
    "output",
    "distill.teacher",
    "distill.logits",
    "data.path",
    "data.sources[].tokenizer",
    "data.sources[].heldout",
    "tokenizer.path",
    "data.sources[].path",  # tokens are read from URLs
    "data.sources[].source",
    "data.sources[].name",
    "sources[].reader",  # module:function
    "evaluation.tasks[].name",
    "run.dir",  # a run may be in an object store
    "tensorboard.job_name",
    "callbacks",
    "sinks",
    "sources[].path",  # data prep reads URLs
    "sources[].name",
    "sources[].include",  # globs within a path
    "sources[].exclude",
    "sources[].id_field",
    "sources[].builder",
    "calibration.split",
    "data.split",
}
"""Keys with text whose name or description speaks of files, and that are no paths."""
SPEAKS_OF_FILES = re.compile(r"\b(director|folder|path|file\b|files\b|environment of the jobs)", re.IGNORECASE)


@pytest.mark.parametrize("text", ["s3://b/x", "s3:/b/x", "gs://b", "hf://o/m", "file:///x", "zip://a::s3://b/c"])
def test_what_is_a_url_is_no_path(text: str) -> None:
    assert is_url(text)
    with pytest.raises(RefusedValueError):
        local_path(text)


@pytest.mark.parametrize(
    "text", ["", "out/run", "/data/a:b/c", "C:/data", "runs/s3", "./s3:/b", "~x/..", "a~b", "a$", "cost$5", "$x/.."]
)
def test_what_a_shell_would_open_is_a_path(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "~x").mkdir()
    (tmp_path / "$x").mkdir()
    monkeypatch.chdir(tmp_path)
    assert local_path(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "file:///data/run",
        "file:/data/run",
        "~/run",
        "~nobody-of-that-name/run",
        "$HOME/run",
        "${HOME}/run",
        "${oc.env:HOME}/run",
        "${NOT_SET:-/data}/run",
        "${oc.env:NOT_SET, /data}/run",
        "$NOT_SET/run",
    ],
)
def test_the_remedy_of_a_file_url_and_of_a_home_is_a_path(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/miller")
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(RefusedValueError) as refused:
        local_path(text)
    instead = refused.value.remedy.removeprefix("use ")
    assert instead.startswith("/")
    assert local_path(instead) == instead


def texts(kind: str) -> Iterator[tuple[str, Any]]:
    """The keys of a kind of config files that hold text."""
    for key in keys(kind):
        nodes = [key.node, *key.node.get("anyOf", ())]
        nodes += [each["items"] for each in nodes if "items" in each]
        if any(each.get("type") == "string" and not {"enum", "const"} & each.keys() for each in nodes):
            yield key.path, key


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_that_is_a_path_refuses_a_url(kind: str) -> None:
    accepted = set()
    for path, key in texts(kind):
        if path in NO_PATHS or not SPEAKS_OF_FILES.search(f"{path} {key.node.get('description', '')}"):
            continue
        listed = any(each.get("type") == "array" for each in [key.node, *key.node.get("anyOf", ())])
        raw = nested(path, [URL] if listed else URL)
        if not any("it is a URL" in each.why for each in problems_of(KINDS[kind].section(), raw)):
            accepted.add(path)
    assert not accepted, "give these keys the type LocalPath, or list them in NO_PATHS"


def nested(path: str, value: Any) -> dict[str, Any]:
    """A config with one key."""
    for name in reversed(re.findall(r"\[[^\]]*\]|[^.\[\]]+", path)):
        if not name.startswith("["):
            value = {name: value}
        elif name == "[]":
            value = [value]
        else:
            value = [{"step": name[1:-1], **value}]
    return dict(value)


def parsers() -> Iterator[tuple[str, Parser]]:
    for verb in VERBS:
        declare, _ = verb.load()
        parser = Parser(prog=verb.name)
        declare(parser)
        yield from below(verb.name, parser)


def below(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb, nested_parser in action.choices.items():
                yield from below(f"{name} {verb}", nested_parser)


def test_every_argument_that_is_a_path_refuses_a_url() -> None:
    found = {
        (name, str(action.metavar), action.help or "", isinstance(action.type, PathArgument))
        for name, parser in parsers()
        for action in parser._actions
        if isinstance(action.metavar, str) and action.help != argparse.SUPPRESS
    }
    spoken = re.compile(r"\b(director|folder|file\b|files\b)", re.IGNORECASE)
    no_paths = {"KIND", "NAME,NAME", "VALUE,VALUE,...", "FROM", "TO"}  # the last two may be URLs
    unknown = {
        (name, metavar)
        for name, metavar, text, is_path in found
        if spoken.search(text) and not is_path and metavar.rpartition("=")[2] not in no_paths
    }
    assert not unknown, "give these arguments a type of foundation/paths.py"
    assert {metavar for _, metavar, _, is_path in found if is_path} >= {
        "OUT",
        "RUN",
        "MODEL",
        "TOKENS",
        "DIR",
        "FILE",
        "FOLDER",
    }


@pytest.mark.parametrize(
    ("verb", "field"),
    [
        (["push", URL, "me/model"], "DIRECTORY"),
        (["card", "http://host/a", "out"], "RUN|FOLDER"),
        (["export", "file:///runs/a", "out"], "RUN"),
        (["quantize", "--config", URL], "--config"),
        (["prep", "pack", URL], "DIR"),
        (["checkpoint", "ls", "http://host/a"], "RUN|CHECKPOINT"),
        (["schema", "--output", URL], "--output"),
    ],
)
def test_a_verb_refuses_a_url_and_writes_nothing(
    verb: list[str], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(verb) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {field} = ")
    assert "it is a URL" in printed
    assert any(words in printed for words in ("aws s3 sync", "use /runs/a", "curl -LO"))
    assert list(tmp_path.iterdir()) == []


def test_what_a_config_extends_and_what_a_library_call_writes_are_paths(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"extends": "s3://bucket/base.json"}')
    with pytest.raises(ConfigError, match="it is a URL"):
        configfile.load(tmp_path / "a.json")
    with pytest.raises(ConfigError, match="it is a URL"):
        fresh_staging(Path(URL))
    assert execute(["--x", "1"], prog="p", declare=lambda parser: parser.add_argument("--y")) == 2
