"""`headrace prep`: the commands of `python -m data_prep`; without a subcommand the whole job is run."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import typer

from data_prep.__main__ import COMMANDS, add_arguments, run_all
from headrace.base.cli import guarded
from headrace.commands.config_kinds import complete_override
from headrace.commands.from_argparse import app_of, parameters_of, set_signature, to_namespace
from headrace.commands.lazy import Verb, lazy_app, sentence

_RUN = "run the whole job, or resume it; the same as 'headrace prep --config F'"
_PANELS = {
    "A job": ("run", "plan", "status"),
    "A tokens directory": ("stats", "verify", "pack"),
    "Pieces of a job, for batch schedulers": ("prepare", "phase", "finish", "share"),
}
_COMPLETIONS = {"overrides": complete_override("corpus")}


def make_app() -> typer.Typer:
    """The application, with options of its own for the case without a subcommand."""
    app = lazy_app([_verb(name, panel) for panel, names in _PANELS.items() for name in names])
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser, "all")

    def prep(ctx: typer.Context, **values: Any) -> None:
        """Turns text into tokens: cleans, deduplicates, tokenizes, shards. A job that was stopped resumes."""
        given = [name for name, value in values.items() if value and value != parser.get_default(name)]
        if ctx.invoked_subcommand is not None:
            if given:
                ctx.fail(f"give the options after '{ctx.invoked_subcommand}'")
            return
        if not given:
            typer.echo(ctx.get_help())
            return
        if not values["config"]:
            ctx.fail("Missing option '--config'.")
        raise typer.Exit(guarded(lambda: run_all(to_namespace(parser, values))))

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    options = parameters_of(parser, completions=_COMPLETIONS, optional=True)
    set_signature(prep, [context, *options])
    app.callback(invoke_without_command=True)(prep)
    return app


def _verb(name: str, panel: str) -> Verb:
    text = sentence(_RUN if name == "run" else COMMANDS[name][1])

    def load() -> typer.Typer:
        run = run_all if name == "run" else COMMANDS[name][0]
        declared = "all" if name == "run" else name
        return app_of(lambda parser: add_arguments(parser, declared), run, text=text, completions=_COMPLETIONS)

    return Verb(name, text, load, panel)
