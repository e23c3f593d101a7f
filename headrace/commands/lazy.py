"""Command groups that import a verb's module only when that verb is typed.

`headrace --help` lists the verbs with their help texts, which are known without any import; the options of a verb, and
the libraries that its module needs, are loaded when the command line names it (or completes it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup


@dataclass(frozen=True)
class Verb:
    """A verb of a command group.

    Attributes:
        name: what is typed.
        text: one line of help.
        load: imports the verb's module and returns its application: one command, or a group of them.
        panel: heading under which the help lists it.
    """

    name: str
    text: str
    load: Callable[[], typer.Typer]
    panel: str | None = None


def sentence(text: str) -> str:
    """A short help text as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def new_app(**options: Any) -> typer.Typer:
    """An application with the settings that all of ours share: plain tracebacks, `-h`, and help texts as they are."""
    names = {"help_option_names": ["-h", "--help"]}
    options = {"add_completion": False, **options}
    return typer.Typer(pretty_exceptions_enable=False, context_settings=names, **options)


def lazy_app(verbs: Sequence[Verb], **options: Any) -> typer.Typer:
    """An application of verbs that are loaded when they are needed.

    Args:
        verbs: in the order of the help.
        options: of `new_app`.
    """
    members = {"verbs": {verb.name: verb for verb in verbs}}
    app = new_app(cls=type("_Verbs", (_LazyGroup,), members), **options)
    for verb in verbs:
        app.command(verb.name, help=verb.text, rich_help_panel=verb.panel)(_not_loaded)
    return app


def _not_loaded() -> None:
    """Stands in the list of commands for a verb that is not loaded."""


class _LazyGroup(TyperGroup):
    """Replaces the verb that is typed by its loaded command, before its options are parsed or completed."""

    verbs: ClassVar[Mapping[str, Verb]] = {}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that `args` name; called for parsing and for completion alike."""
        word = args[0] if args else ""
        if word in self.verbs:
            command = typer.main.get_command(self.verbs[word].load())
            command.name = word
            self.commands[word] = command
        return super().resolve_command(ctx, args)
