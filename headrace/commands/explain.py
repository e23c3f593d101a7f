"""`headrace explain KEY`: explains a config key, its type, default and an example, for every kind of config files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from foundation.command_line import complete_with
from foundation.config_kinds import KINDS, example_file, keys, parts_of
from foundation.errors import ConfigError
from foundation.json_schema import NO_DEFAULT, Key, as_json
from foundation.paths import FOLDER
from foundation.section import suggest

_FREE = "model.config."
"""Beginning of a path within an object whose keys are the model family's."""
_TEXT = """\
Explains a config key: what it means, its type, its default and an example.

For a section it lists the keys; without a KEY it lists the sections of all kinds of config files. A key may be written
as in --set (data.sources.0.weight), with brackets (data.sources[].weight), or as its last name alone.

"layout FAMILY" prints how a model family is divided into pipeline stages and tensor-parallel shards."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the argument."""
    parser.description = _TEXT
    key = parser.add_argument("key", metavar="KEY", nargs="?", default="", help="e.g. run.keep_every")
    complete_with(key, _complete)
    text = "after layout: a Hugging Face folder, or a model_type of transformers (gpt2)"
    parser.add_argument("family", metavar="FAMILY", nargs="?", type=FOLDER, help=text)


def run(arguments: argparse.Namespace) -> None:
    """Prints the explanation of a key, or of a family's layout."""
    for line in lines_of(arguments.key) if arguments.family is None else _layout(arguments.key, arguments.family):
        print(line)


def _layout(word: str, family: str) -> Iterator[str]:
    from pipeline.engines.parallel.architecture_limits import layout_lines  # noqa: PLC0415  # it imports torch

    if word != "layout":
        raise ConfigError("FAMILY", family, why=f"{word} is a key", remedy=f"use headrace explain layout {family}")
    return layout_lines(family)


def _complete(incomplete: str) -> list[str]:
    return [key.path for kind in KINDS for key in keys(kind) if key.path.startswith(incomplete)]


def lines_of(path: str) -> list[str]:
    """The lines that explain a key or section, or list all sections for an empty path.

    Raises:
        ConfigError: there is no such key; the message names the nearest one.
    """
    if not path:
        return list(_overview())
    asked = parts_of(path)
    found = [(kind, key) for kind in KINDS for key in keys(kind) if parts_of(key.path) == asked]
    exact = any(kind == "run" for kind, _ in found)
    if not found:  # the last names of a path are enough
        found = [(kind, key) for kind in KINDS for key in keys(kind) if parts_of(key.path)[-len(asked) :] == asked]
    elsewhere = [] if exact else list(_elsewhere(path, {key.path for _, key in found}))
    blocks = [list(_section(kind, key) if key.is_section else _one(kind, key)) for kind, key in found]
    blocks = [*([elsewhere] if elsewhere else []), *blocks]
    if not blocks:
        return list(_free_or_refused(path, asked))
    return [line for number, block in enumerate(blocks) for line in ([""] if number else []) + block]


def _elsewhere(path: str, shown: set[str]) -> Iterator[str]:
    """Explains another tool's name of a key; nothing if it is unknown, or if our key is among those that are shown."""
    from pipeline.config.foreign_names import find_name  # noqa: PLC0415

    found = find_name(path)
    if found is None or path.startswith(_FREE) or path in _refused() or shown & {*found.ours}:
        return
    yield f"{path}  (a name of other tools, for {KINDS['run'].what})"
    yield from [f"  {found.why}", f"  instead  {found.remedy()}"] if found.no else [f"  here     {found.remedy()}"]
    for key in keys("run"):
        if key.path in found.ours:
            yield from ["", *_one("run", key)]


def _overview() -> Iterator[str]:
    for number, kind in enumerate(KINDS.values()):
        yield from ([""] if number else [])
        yield f"{kind.name}: {kind.what} ({kind.used_by})"
        plain = [key.path for key in keys(kind.name) if "." not in key.path and not key.is_section]
        for key in keys(kind.name):
            if key.is_section and "." not in key.path:
                yield f"  {key.path:<24} {key.description}"
        yield f"  and the keys {', '.join(plain)}"
    yield ""
    yield "headrace explain SECTION lists the keys of a section, headrace explain SECTION.KEY explains one."


def _one(kind: str, key: Key) -> Iterator[str]:
    default = "none: the key is required" if key.required else "" if key.default is NO_DEFAULT else as_json(key.default)
    yield f"{key.path}  (in {KINDS[kind].what})"
    yield from ([f"  {key.description}"] if key.description else [])
    yield f"  type     {key.wanted}"
    yield from ([f"  default  {default}"] if default else [])
    yield f"  example  {example_file(key, kind)}"
    yield f"  read by  {KINDS[kind].used_by}"


def _section(kind: str, section: Key) -> Iterator[str]:
    yield f"{section.path}  (in {KINDS[kind].what})"
    yield from ([f"  {section.description}"] if section.description else [])
    yield f"  type     {section.wanted}"
    yield f"  read by  {KINDS[kind].used_by}"
    inner = [key for key in keys(kind) if key.path.startswith((f"{section.path}.", f"{section.path}["))]
    width = max(len(key.path) for key in inner)
    for key in inner:
        default = "" if key.required or key.default is NO_DEFAULT else f" [{as_json(key.default)}]"
        yield f"  {key.path:<{width}}  {key.description}{default}"


def _free_or_refused(path: str, asked: tuple[str, ...]) -> Iterator[str]:
    """Explains keys within free objects and DeepSpeed keys that runs ignore; refuses unknown keys."""
    refused = _refused()
    if path in refused:
        yield f"{path}  (in {KINDS['run'].what})"
        yield f"  a key of DeepSpeed that headrace does not run: {refused[path]}"
        return
    for kind in KINDS:
        for key in keys(kind):
            if parts_of(key.path) == asked[:-1] and not key.is_section and "object" in key.wanted:
                yield from _one(kind, key)
                yield f"  {asked[-1]} is a key of this object"
                return
    why = "there is no such key, and no name of another tool's that is known here"
    raise ConfigError("KEY", path, why=why, remedy=_nearest(path))


def _refused() -> dict[str, str]:
    from pipeline.config.deepspeed.keys import REFUSED, REFUSED_ZERO  # noqa: PLC0415

    return REFUSED | {f"zero_optimization.{name}": remedy for name, remedy in REFUSED_ZERO.items()}


def _nearest(path: str) -> str:
    from pipeline.config.foreign_names import foreign_names  # noqa: PLC0415

    paths = [key.path for kind in KINDS for key in keys(kind)]
    by_name = {parts_of(each)[-1]: each for each in reversed(paths)}
    name = suggest((parts_of(path) or (path,))[-1], list(by_name))
    near = [suggest(path, paths), by_name[name] if name else None]
    ordered = [*(near if "." in path else reversed(near)), suggest(path, list(foreign_names()))]
    found = next((each for each in ordered if each), None)
    if found is None:
        return "headrace explain, without a key, lists the sections"
    return f"did you mean '{found}'? It is the nearest by spelling"
