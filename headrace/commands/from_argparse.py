"""Typer commands made of argparse declarations, so that the options of a verb are declared once.

The modules behind the verbs declare their options on an `argparse.ArgumentParser` (`add_arguments`) and take a
`Namespace` (`run`). That serves `python -m data_prep`, `python -m pipeline` and scripts that a launcher starts on
thousands of ranks. Here each argparse action becomes a parameter of a typer command, which adds help in panels, shell
completion and suggestions for misspelt options.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.markup import escape

from headrace.base.cli import guarded
from headrace.commands.lazy import new_app, sentence

Declare = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int | None]
Complete = Callable[[str], list[str]]
_AS_TYPED = (str, Path)
_WANTED = {int: "a whole number", float: "a number"}


class CommandModule(Protocol):
    """A module that implements a verb."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares its options."""

    def run(self, arguments: argparse.Namespace) -> int | None:
        """Does the work; returns the exit code."""


def app_of(
    add_arguments: Declare, run: Run, *, text: str, completions: Mapping[str, Complete] | None = None
) -> typer.Typer:
    """An application with the options of `add_arguments` that calls `run`.

    Args:
        add_arguments: declares the options, or subcommands with options of their own.
        run: is called with the parsed options; its return value is the exit code.
        text: help of the command.
        completions: by the name of an option's destination, what completes its value.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    app = new_app(help=text)
    subparsers = next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
    if subparsers is None:
        app.command(help=text)(command(parser, run, completions=completions))
        return app
    texts = {choice.dest: choice.help for choice in subparsers._choices_actions}
    for name, subparser in subparsers.choices.items():
        fixed = {subparsers.dest: name}
        app.command(name, help=sentence(texts.get(name) or ""))(
            command(subparser, run, fixed=fixed, completions=completions)
        )
    return app


def command(
    parser: argparse.ArgumentParser,
    run: Run,
    *,
    fixed: Mapping[str, Any] | None = None,
    completions: Mapping[str, Complete] | None = None,
) -> Callable[..., None]:
    """A function whose parameters are the parser's options, as `typer.Typer.command` takes it.

    Args:
        fixed: further attributes of the namespace.
        completions: see `app_of`.
    """

    def call(**values: Any) -> None:
        namespace = to_namespace(parser, values)
        for name, value in (fixed or {}).items():
            setattr(namespace, name, value)
        raise typer.Exit(guarded(lambda: run(namespace)))

    set_signature(call, parameters_of(parser, completions=completions))
    return call


def set_signature(function: Any, parameters: list[inspect.Parameter]) -> None:
    """Gives a function the parameters that typer reads."""
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def parameters_of(
    parser: argparse.ArgumentParser, *, completions: Mapping[str, Complete] | None = None, optional: bool = False
) -> list[inspect.Parameter]:
    """The parser's options as parameters annotated for typer.

    Args:
        completions: see `app_of`.
        optional: nothing is required, as for options of a group whose subcommands have their own.
    """
    known = completions or {}
    panels = {action.dest: group.title for group in _groups(parser) for action in group._group_actions}
    return [
        _parameter(action, known.get(action.dest), optional=optional, panel=panels.get(action.dest))
        for action in _options(parser)
    ]


def to_namespace(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> argparse.Namespace:
    """What argparse would have parsed.

    Raises:
        typer.BadParameter: options exclude each other.
    """
    for group in parser._mutually_exclusive_groups:
        names = ["/".join(action.option_strings) for action in group._group_actions]
        given = [action for action in group._group_actions if values[action.dest] != action.default]
        if len(given) > 1 or (group.required and not given):
            raise typer.BadParameter(f"give one of {' and '.join(names)}")
    namespace = argparse.Namespace()
    for action in _options(parser):
        value = values[action.dest]
        setattr(namespace, action.dest, action.default if value is None else value)
    return namespace


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [a for a in parser._actions if not isinstance(a, argparse._SubParsersAction | argparse._HelpAction)]


def _groups(parser: argparse.ArgumentParser) -> list[argparse._ArgumentGroup]:
    """The groups that `add_arguments` has made: panels of the help."""
    return [each for each in parser._action_groups if each not in (parser._positionals, parser._optionals)]


def _parameter(
    action: argparse.Action, complete: Complete | None, *, optional: bool, panel: str | None
) -> inspect.Parameter:
    required = action.required and not optional  # an argument is, unless its nargs is "?"
    options: dict[str, Any] = {"help": _help(action), "metavar": action.metavar, "show_default": False}
    if panel is not None:
        options["rich_help_panel"] = panel
    if complete is not None:
        options["autocompletion"] = complete
    if action.choices:
        choices = [str(choice) for choice in action.choices]
        options |= {"metavar": "|".join(choices), "autocompletion": lambda incomplete: _starting(incomplete, choices)}
    if action.choices or action.type not in (None, *_AS_TYPED):
        options["parser"] = _parser_of(action)
        options["metavar"] = options["metavar"] or "NUMBER"
    if isinstance(action, argparse._StoreTrueAction):
        options.pop("metavar")
    if action.help == argparse.SUPPRESS:
        options |= {"hidden": True, "help": None}
    declared: Any = typer.Option(*action.option_strings, **options)
    if not action.option_strings:
        declared = typer.Argument(**options)
    annotation = _type(action) if required else _type(action) | None
    default = inspect.Parameter.empty if required else (action.default or None)
    return inspect.Parameter(
        action.dest, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, declared]
    )


def _type(action: argparse.Action) -> Any:
    if isinstance(action, argparse._StoreTrueAction):
        return bool
    if isinstance(action, argparse._AppendAction) or action.nargs == argparse.ZERO_OR_MORE:
        return list[str]
    return action.type if action.type in _AS_TYPED else str


def _starting(word: str, choices: Sequence[str]) -> list[str]:
    return [choice for choice in choices if choice.startswith(word)]


def _parser_of(action: argparse.Action) -> Callable[[str], Any]:
    """The type function of an argparse action, with errors as typer shows them."""
    convert: Any = action.type or str

    def parse(text: str) -> Any:
        if action.choices and text not in action.choices:
            raise typer.BadParameter(f"{text!r} is none of {', '.join(action.choices)}")
        try:
            return convert(text)
        except (argparse.ArgumentTypeError, ValueError) as error:
            why = f"{text!r} is not {_WANTED[convert]}" if convert in _WANTED else str(error)
            raise typer.BadParameter(why) from None

    parse.__name__ = str(action.metavar or action.dest)
    return parse


def _help(action: argparse.Action) -> str:
    return escape((action.help or "") % vars(action))
