"""`headrace schema`: the JSON Schema of a kind of config files, and the reference page made from it."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from foundation.command_line import complete_with
from foundation.config_kinds import KINDS, keys
from foundation.errors import ConfigError
from foundation.json_schema import NO_DEFAULT, Key, as_json
from foundation.paths import LOCAL

_INTRODUCTION = """\
Made by `headrace schema --markdown` from the classes that read the files; do not edit it. `headrace explain KEY`
prints one entry, `headrace schema` the JSON Schema for editors. `[]` stands for the items of a list.

A config file is JSON (comments and trailing commas are allowed) or YAML, by its suffix. Two keys are allowed at the
top of any: `"extends"`, a file or a list of files that it builds on, and `"$schema"`, which is for editors. Whole
numbers may be written as `40e9`.

A key that has no default may be left out or null, unless it says that it is required.
"""

_SHORT = {
    "a whole number": "int",
    "whole numbers": "ints",
    "a number": "number",
    "an object": "object",
    "a list": "list",
    "true or false": "true, false",
    ", at least ": " ≥",
    ", above ": " >",
    " and at most ": ", ≤",
    " and below ": ", <",
    " that is not empty": "",
    ", not empty": "",
    ", or ": " or ",
}
"""Phrase of `json_schema.wanted` -> its short form in a list."""


_TEXT = """\
Prints the JSON Schema (draft 2020-12) of a kind of config files.

An editor that is given it completes keys, shows what they mean and underlines what is wrong. Write it to a file and
name that file at the top of a config: "$schema": "run.schema.json"."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.description = _TEXT
    text = f"one of {', '.join(KINDS)}; default: %(default)s"
    kind = parser.add_argument("kind", metavar="KIND", nargs="?", default="run", help=text)
    complete_with(kind, lambda incomplete: [kind for kind in KINDS if kind.startswith(incomplete)])
    parser.add_argument("--output", metavar="FILE", type=LOCAL.as_path(), help="write it there instead of printing it")
    parser.add_argument("--markdown", action="store_true", help="print docs/config-reference.md instead")


def run(arguments: argparse.Namespace) -> None:
    """Prints a schema, or writes it."""
    kind, output = arguments.kind, arguments.output
    if kind not in KINDS:
        raise ConfigError("KIND", kind, why="there is no such kind of config", remedy=f"one of {', '.join(KINDS)}")
    text = reference() if arguments.markdown else json.dumps(KINDS[kind].schema(), indent=2, ensure_ascii=False) + "\n"
    if output is None:
        print(text, end="", flush=True)
    else:
        output.write_text(text, encoding="utf-8")
        print(f"{output} written")


def reference() -> str:
    """The page docs/config-reference.md: every key of every kind of config files, with type, default and meaning."""
    homes = _homes()
    lines = (line for kind in KINDS for line in _page(kind, homes))
    return "\n".join(["# Config reference", "", _INTRODUCTION, *lines])


@dataclass(frozen=True)
class _KeyGroup:
    """The keys under one heading.

    Attributes:
        section: The key that holds the keys; None at the top of a file.
        prefix: The common path of the keys, with its final dot.
    """

    kind: str
    section: Key | None
    prefix: str
    keys: tuple[Key, ...]

    @property
    def name(self) -> str:
        """The heading, which lines under other headings refer to."""
        file = "" if self.kind == "run" else f" of {KINDS[self.kind].what}"
        return f"`{self.prefix.rstrip('.')}`{file}" if self.prefix else "the first list"

    @property
    def text(self) -> str:
        """Sentences about the section; sentences that its objects and its key share appear once."""
        section = self.section
        if section is None:
            return ""
        variant = self.prefix.rstrip(".").removeprefix(section.path).strip("[]")
        both = self.prefix.endswith("[].") or not section.section_text
        texts = [] if variant else list(dict.fromkeys([section.section_text, section.description if both else ""]))
        told = re.search("absent|null", " ".join(texts))
        mark = "Required." if section.required else "Absent by default." if section.default is None and not told else ""
        return " ".join([*(_sentence(text) for text in texts if text), mark]).strip()


def _groups(kind: str) -> Iterator[_KeyGroup]:
    found = keys(kind)
    yield _KeyGroup(kind, None, "", tuple(key for key in found if not re.search(r"[.\[]", key.path)))
    for section in (key for key in found if key.is_section):
        for prefix in dict.fromkeys(m[0] for key in found if (m := _below(section.path, key.path))):
            yield _KeyGroup(kind, section, prefix, tuple(key for key in found if _is_child(prefix, key.path)))


def _homes() -> dict[str, _KeyGroup]:
    """The line of a key -> the group that prints it: under the shortest path with that line, the first of several."""
    found: dict[str, _KeyGroup] = {}
    for group in (group for kind in KINDS for group in _groups(kind)):
        for line in (_line(key, group.prefix) for key in group.keys):
            if line not in found or group.prefix.count(".") < found[line].prefix.count("."):
                found[line] = group
    return found


def _page(kind: str, homes: dict[str, _KeyGroup]) -> Iterator[str]:
    yield from (f"## {_sentence(KINDS[kind].what).rstrip('.')}", "", f"Read by: {KINDS[kind].used_by}.", "")
    for group in _groups(kind):
        if group.section:
            yield from (f"### `{group.prefix.rstrip('.')}`", "")
        if group.text:
            yield from (textwrap.fill(group.text, 120, break_on_hyphens=False), "")
        yield from (_item(line) for line in _lines(group, homes))
        yield ""


def _lines(group: _KeyGroup, homes: dict[str, _KeyGroup]) -> Iterator[str]:
    """A line for each key that no other heading explains, and one line for all keys that another heading explains."""
    elsewhere: dict[str, list[str]] = {}
    for key in (key for key in group.keys if not key.is_section and not key.path.endswith("].step")):
        line = _line(key, group.prefix)
        home = homes[line]
        if (home.kind, home.prefix) == (group.kind, group.prefix):
            yield line
        else:
            elsewhere.setdefault(home.name, []).append(f"`{key.path.removeprefix(group.prefix)}`")
    yield from (f"{', '.join(names)}: as in {home}." for home, names in elsewhere.items())


def _item(line: str) -> str:
    text = re.sub(r"`[^`]*`|<", lambda found: "&lt;" if found[0] == "<" else found[0], line)
    return textwrap.fill(f"- {text}", 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _below(section: str, path: str) -> re.Match[str] | None:
    return re.match(rf"{re.escape(section)}(?:\[\w*\])?\.", path)


def _is_child(prefix: str, path: str) -> bool:
    return path.startswith(prefix) and not re.search(r"[.\[]", path.removeprefix(prefix))


def _line(key: Key, prefix: str) -> str:
    default = "" if key.default in (None, NO_DEFAULT) else f"default `{as_json(key.default)}`"
    facts = [_type(key), "required" if key.required else default]
    in_brackets = f" ({', '.join(fact for fact in facts if fact)})" if any(facts) else ""
    return f"`{key.path.removeprefix(prefix)}`{in_brackets}: {_sentence(key.description)}"


def _type(key: Key) -> str:
    """The allowed values in few words; empty if the default or the meaning shows them."""
    wanted = key.wanted.removesuffix(", or null")
    choices = re.findall(r'"([^"]*)"', wanted) if wanted.startswith("one of") else []
    unnamed = [each for each in choices if not re.search(rf"(?<!\w){re.escape(each)}(?!\w)", key.description)]
    plain = isinstance(key.default, (bool, str)) and wanted in ("true or false", "text")
    if plain or (choices and not unnamed):
        return ""
    for long, short in _SHORT.items():
        wanted = wanted.replace(long, short)
    return wanted


def _sentence(text: str) -> str:
    """Capitalizes the first word, unless it is a value, and ends with a full stop."""
    first = text[0] if re.match(r"\w+:|[a-z]+[\d_.]|dtype", text) else text[0].upper()
    return f"{first}{text[1:]}{'' if text.endswith('.') else '.'}"
