"""`headrace schema`: the JSON Schema of a kind of config files, and the reference page that is made of it."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterator

from headrace.base.command_line import complete_with
from headrace.base.config_kinds import KINDS, keys
from headrace.base.errors import ConfigError
from headrace.base.json_schema import NO_DEFAULT, Key, as_json
from headrace.base.paths import LOCAL

_INTRODUCTION = """\
Made by `headrace schema --markdown` from the classes that read the files; do not edit it. `headrace explain KEY`
prints one entry, `headrace schema` the JSON Schema for editors. `[]` stands for the items of a list.

A config file is JSON (comments and trailing commas are allowed) or YAML, by its suffix. Two keys are allowed at the
top of any: `"extends"`, a file or a list of files that it builds on, and `"$schema"`, which is for editors. Whole
numbers may be written as `40e9`.
"""


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
    return "\n".join(["# Config reference", "", _INTRODUCTION, *(line for kind in KINDS for line in _page(kind))])


def _page(kind: str) -> Iterator[str]:
    found = keys(kind)
    yield from (f"## {KINDS[kind].what[0].upper()}{KINDS[kind].what[1:]}", "", f"Read by: {KINDS[kind].used_by}.", "")
    yield from _table([key for key in found if not re.search(r"[.\[]", key.path)], "")
    for section in (key for key in found if key.is_section):
        prefixes = dict.fromkeys(m[0] for key in found if (m := _below(section.path, key.path)))
        for prefix in prefixes:
            yield from (f"### `{prefix.rstrip('.')}`", "")
            if text := section.section_text or section.description:
                yield from (textwrap.fill(_capital(text), 120, break_on_hyphens=False), "")
            yield from _table([key for key in found if _is_child(prefix, key.path)], prefix)


def _below(section: str, path: str) -> re.Match[str] | None:
    return re.match(rf"{re.escape(section)}(?:\[\w*\])?\.", path)


def _is_child(prefix: str, path: str) -> bool:
    return path.startswith(prefix) and not re.search(r"[.\[]", path.removeprefix(prefix))


def _table(rows: list[Key], prefix: str) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key in rows:
        default = "required" if key.required else "" if key.default is NO_DEFAULT else f"`{as_json(key.default)}`"
        cells = (f"`{key.path.removeprefix(prefix)}`", key.wanted, default, key.description)
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"
    yield ""


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}".rstrip(".") + "."
