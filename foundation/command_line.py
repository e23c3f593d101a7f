"""One argparse interface for every verb: help under headings, suggestions for typos, shell completion.

Each verb's module declares its options, and only the module of the given verb is imported.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from foundation.cli import guarded
from foundation.errors import HeadraceError
from foundation.paths import PathArgument, is_store_url, refuse_url
from foundation.remote_folder import local_directory, local_folder
from foundation.remote_output import all_published, local_output
from foundation.remote_run import local_run
from foundation.verbs import Declare, Verb

_WANTED: dict[Any, str] = {int: "a whole number", float: "a number"}
_OF_DEEPSPEED = "--config FILE for --deepspeed and --deepspeed_config: the same file, with model, data and run in it;"
_COMPLETING = "_ARGCOMPLETE"
"""Environment variable with which the shell's completion function asks for completions instead of the command."""
_COPIED = {"run": local_run, "folder": local_folder, "directory": local_directory}
"""Kind of directory that an argument reads -> function that copies one from an object store to this host."""


class Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest valid word for a typo.

    Attributes:
        words: words on the command line after the parser's verb.
        active: the parser of the given verb, or this one if there is no verb.
        config: kind of config file that `--set` overrides.
        has_verbs: whether `add_verbs` has added verbs.
        outputs: URLs on the command line that are outputs.
        intermixed: whether options may stand between positional arguments of which there may be several.
    """

    def __init__(self, *, words: Iterable[str] = (), config: str = "run", **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **options})
        self.words, self.config, self.has_verbs = list(words), config, False
        self.active: Parser = self
        self.outputs: list[str] = []
        self.intermixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses the words and keeps them for error messages, because nested verbs get theirs only here."""
        self.words = self.words if args is None else list(args)
        if self.intermixed:
            self.intermixed = False  # argparse calls this method again, for options and for the rest
            return self.parse_known_intermixed_args(args, namespace)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2 and suggests the intended option."""
        near = [f"did you mean '{found}'?"] if (found := self._nearest_option()) else []
        near = [_OF_DEEPSPEED] if self._names_deepspeeds_file() else near
        self.exit(2, f"error: {message}\n  try: {' '.join([*near, f'{self.prog} --help'])}\n")

    def _nearest_option(self) -> str | None:
        known = [option for parser in _with_nested(self) for option in parser._option_string_actions]
        typed = (word.partition("=")[0] for word in self.words if word.startswith("--"))
        unknown = next((word for word in typed if word not in known), None)
        return _nearest(unknown, known) if unknown else None

    def _names_deepspeeds_file(self) -> bool:
        """Whether the words have `--deepspeed` or `--deepspeed_config`, and this parser has `--config` instead."""
        typed = {word.partition("=")[0] for word in self.words} & {"--deepspeed", "--deepspeed_config"}
        known = {option for parser in _with_nested(self) for option in parser._option_string_actions}
        return "--config" in known and bool(typed - known)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        near = f". Did you mean '{found}'?" if (found := _nearest(str(value), names)) else ""
        raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(names)}{near}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if isinstance(action.type, PathArgument):
            arg_string = self._on_this_host(action, action.type, arg_string)
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if action.type not in _WANTED:
                raise
        raise argparse.ArgumentError(action, f"{arg_string!r} is not {_WANTED[action.type]}")

    def _on_this_host(self, action: argparse.Action, path: PathArgument, text: str) -> str:
        """Replaces a URL by a path on this host, or refuses it."""
        given = text.partition("=")[2] if path.named else text
        if path.url == "refused" or not is_store_url(given):
            refuse_url(given, field=next(iter(action.option_strings), str(action.metavar)))
        elif path.url == "output":
            self.outputs.append(given.rstrip("/"))
            return str(local_output(self.outputs[-1]))
        elif path.url != "kept":
            return text.removesuffix(given) + str(_COPIED[path.url](given.rstrip("/")))
        return text


def add_verbs(parser: Parser, verbs: Sequence[Verb], *, metavar: str = "VERB") -> None:
    """Adds verbs to a parser and lists them in its help; declares only the options of the given verb."""
    parser.has_verbs = True
    subparsers = parser.add_subparsers(metavar=metavar, help=argparse.SUPPRESS)
    parser.usage = f"%(prog)s {metavar} [options]"
    parser.epilog = "\n\n".join(filter(None, [_listed(verbs), parser.epilog]))
    for verb in verbs:
        typed = parser.words[:1] == [verb.name]
        options: dict[str, Any] = {"words": parser.words[1:] if typed else (), "config": verb.config, "add_help": typed}
        sub = subparsers.add_parser(verb.name, help=verb.text, description=_sentence(verb.text), **options)
        sub.set_defaults(_misplaced=None if typed else verb.name)
        if typed:
            declare, run = verb.load()
            sub.set_defaults(_run=run)
            declare(sub)
            parser.active = sub.active


def execute(
    words: Sequence[str], *, prog: str, declare: Declare, description: str | None = None, config: str = "run"
) -> int:
    """Parses a command line and runs its verb.

    Args:
        words: words of the command line, without the program.
        prog: name of the program, as the user types it.
        declare: function that declares options on a `Parser`, or verbs by `add_verbs`; it sets the default of `_run`,
            the function to run.
        config: kind of config file that `--set` overrides if there is no verb.

    Returns:
        The exit code.
    """
    completing = _COMPLETING in os.environ
    words = _words_to_complete() if completing else _without_rank(words)
    parser = Parser(prog=prog, description=description, words=words, config=config)
    declare(parser)
    if completing:
        _complete(parser.active, parser)
    try:
        return _run(parser, words)
    except SystemExit as error:  # argparse exits this way after --help, --version and errors
        return error.code if isinstance(error.code, int) else 1


def complete_with(action: argparse.Action, complete: Callable[[str], list[str]]) -> None:
    """Makes a function complete the value of an option from its first characters."""
    vars(action)["completer"] = lambda prefix, **_: complete(prefix)


def _run(parser: Parser, words: Sequence[str]) -> int:
    active = parser.active
    if active.has_verbs and not active.words:
        active.print_help()
        return 0
    try:
        arguments, unknown = parser.parse_known_args(words)
    except HeadraceError as error:
        refusal = error
        return guarded(lambda: _raise(refusal))
    if (verb := getattr(arguments, "_misplaced", None)) is not None:
        active.error(f"give the options after '{verb}'")
    if unknown:
        active.error(f"unrecognized arguments: {' '.join(unknown)}")
    outputs = [url for each in _with_nested(parser) if isinstance(each, Parser) for url in each.outputs]
    return guarded(lambda: publish_outputs(outputs, lambda: arguments._run(arguments)))


def publish_outputs(outputs: Sequence[str], run: Callable[[], int | None]) -> int | None:
    """Calls a function, then uploads its outputs, each from the `local_output` of its URL."""
    if not outputs:
        return run()
    with all_published(outputs):
        code = run()
    print(f"uploaded to {', '.join(outputs)}", flush=True)
    return code


def _raise(error: HeadraceError) -> NoReturn:
    raise error


def _without_rank(words: Sequence[str]) -> list[str]:
    """Drops `--local_rank`, which the deepspeed launcher puts first; ranks read it from the environment instead."""
    if words and words[0].startswith("--local_rank"):
        return list(words[1 if "=" in words[0] else 2 :])
    return list(words)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _listed(verbs: Sequence[Verb]) -> str:
    width = max(len(verb.name) for verb in verbs) + 4
    lines: list[str] = []
    for heading in dict.fromkeys(verb.heading for verb in verbs):
        lines += ["", f"{heading}:"]
        for verb in verbs:
            if verb.heading == heading:
                text = textwrap.wrap(_sentence(verb.text), 100 - width)
                lines.append(f"  {verb.name}".ljust(width) + f"\n{' ' * width}".join(text))
    return "\n".join(lines[1:])


def _nearest(word: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def _with_nested(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields a parser and its subcommands' parsers."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for nested in action.choices.values():
                yield from _with_nested(nested)


def _words_to_complete() -> list[str]:
    """The complete words before the cursor, without the program."""
    from argcomplete.lexers import split_line  # noqa: PLC0415

    *_, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    return list(words[1:])


def _complete(active: Parser, parser: Parser) -> NoReturn:
    """Prints the completions at the cursor for the shell, and ends the process."""
    import argcomplete  # noqa: PLC0415

    from foundation.config_kinds import complete_override  # noqa: PLC0415

    for each in _with_nested(active):
        for action in each._actions:
            if action.dest == "overrides":
                complete_with(action, complete_override(active.config))
    argcomplete.autocomplete(parser)
    sys.exit(1)
