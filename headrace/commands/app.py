"""The command `headrace`: every verb, in the order of the data's way from text to a compressed model.

The verbs are those of `python -m data_prep` and `python -m pipeline`, with the entry points that a launcher starts;
their options are declared in those packages. Nothing here imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from headrace.base.cli import leave
from headrace.base.version import __version__
from headrace.commands.lazy import Verb, lazy_app, sentence

DATA_PREP, TRAINING, CLUSTER, MODELS = "Data prep", "Training", "Cluster", "Models"
COMPRESSION, CONFIG = "Compression", "Config"


def main() -> None:
    """Entry point of the console script and of `python -m headrace`."""
    try:
        app(prog_name="headrace")
    except SystemExit as error:  # click ends with one, always
        leave(error.code if isinstance(error.code, int) else 1)


def _prep() -> typer.Typer:
    from headrace.commands import prep  # noqa: PLC0415

    return prep.make_app()


def _pipeline(name: str) -> typer.Typer:
    """A verb of `python -m pipeline`."""
    from headrace.commands.config_kinds import complete_override  # noqa: PLC0415
    from headrace.commands.from_argparse import app_of  # noqa: PLC0415
    from pipeline.__main__ import COMMANDS  # noqa: PLC0415

    module_name, text = COMMANDS[name]
    module = import_module(module_name)
    kind = name if name in ("prune", "quantize", "compress") else "run"
    completions = {"overrides": complete_override(kind)}
    return app_of(module.add_arguments, module.run, text=sentence(text), completions=completions)


def _own(name: str) -> typer.Typer:
    """A verb that a module of this package implements."""
    made: typer.Typer = import_module(f"headrace.commands.{name}").app
    return made


def _verbs() -> list[Verb]:
    from pipeline.__main__ import COMMANDS  # noqa: PLC0415

    def of_pipeline(name: str, panel: str) -> Verb:
        return Verb(name, sentence(COMMANDS[name][1]), lambda: _pipeline(name), panel)

    def own(name: str, text: str, panel: str) -> Verb:
        return Verb(name, text, lambda: _own(name), panel)

    return [
        Verb("prep", "Turn text into tokens: clean, deduplicate, tokenize, shard.", _prep, DATA_PREP),
        *(
            of_pipeline(name, TRAINING)
            for name in (
                "plan",
                "train",
                "prove",
                "islands",
                "replicas",
                "check",
                "goodput",
                "ladder",
                "samples",
                "report",
            )
        ),
        own("status", "Show how far a run is, live: step, loss, goodput, restarts, Slurm job; why it ended.", TRAINING),
        of_pipeline("checkpoint", TRAINING),
        own(
            "submit",
            "Submit configs to Slurm: data prep, training, export, compression, in a chain.",
            CLUSTER,
        ),
        *(of_pipeline(name, MODELS) for name in ("export", "eval", "complete")),
        *(of_pipeline(name, COMPRESSION) for name in ("prune", "cache-logits", "distill", "quantize", "compress")),
        own("schema", "Print the JSON Schema of a config file, for editors.", CONFIG),
        own("explain", "Explain a config key: meaning, type, default, example.", CONFIG),
    ]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


app = lazy_app(_verbs(), add_completion=True)


@app.callback(invoke_without_command=True)
def _headrace(
    ctx: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    # the deepspeed launcher puts it in front of a script's arguments; ranks read their place from the environment
    _local_rank: Annotated[int, typer.Option("--local_rank", hidden=True)] = 0,
) -> None:
    """From raw text to a small language model that serves. 'headrace VERB --help' shows the options of a verb."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
