"""The command `headrace`: every verb of `foundation.verbs`. Nothing here imports torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from foundation.cli import leave
from foundation.command_line import Parser, add_verbs, execute
from foundation.errors import ConfigError
from foundation.verbs import VERBS
from foundation.version import __version__

_TEXT = "From raw text to a small language model that serves. 'headrace VERB --help' shows the options of a verb."
_SHELLS = {"bash": ".bashrc", "zsh": ".zshrc"}
"""Shell -> its start-up file."""


def main() -> None:
    """Entry point of the console script and of `python -m headrace`."""
    leave(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Runs a command line, given without the program; returns the exit code."""
    return execute(words, prog="headrace", declare=_declare, description=_TEXT)


def _declare(parser: Parser) -> None:
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    known, mine = "|".join(_SHELLS), Path(os.environ.get("SHELL", "")).name
    for option, text in (
        ("--install-completion", "complete verbs, options and config keys in this shell from now on"),
        ("--show-completion", "print the script that completes them"),
    ):
        parser.add_argument(option, nargs="?", const=mine, metavar=known, help=text)
    parser.set_defaults(_run=_completion)
    add_verbs(parser, VERBS)


def _completion(arguments: argparse.Namespace) -> None:
    install = arguments.install_completion is not None
    shell = arguments.install_completion if install else arguments.show_completion
    if shell not in _SHELLS:
        why = "completion is made for bash and zsh"
        raise ConfigError("--install-completion" if install else "--show-completion", shell, why=why, remedy="name one")
    from argcomplete.shell_integration import shellcode  # noqa: PLC0415

    script = shellcode(["headrace"], shell=shell)
    if not install:
        print(script)
        return
    path, startup = Path.home() / f".local/share/headrace/completion.{shell}", Path.home() / _SHELLS[shell]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    line = f'source "{path}"'
    before = startup.read_text() if startup.exists() else ""
    if line not in before.splitlines():
        with startup.open("a") as file:
            file.write(f"{line}\n")
    print(f"{path} written; {startup} sources it: open a new shell")
