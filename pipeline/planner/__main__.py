"""`python -m pipeline.planner COMMAND`. `--help` lists the commands."""

from __future__ import annotations

import argparse
from typing import Protocol

from headrace.base.cli import guarded, leave
from pipeline.planner import command_goodput


class Command(Protocol):
    """A module of a command."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares its arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Runs it; returns the exit code."""


_COMMANDS: dict[str, tuple[Command, str]] = {
    "goodput": (command_goodput, "goodput under failures, and the best checkpoint interval")
}


def main() -> int:
    """Parses the command line and runs the command."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.planner", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + "."))
    arguments = parser.parse_args()
    module, _ = _COMMANDS[arguments.command]
    return module.run(arguments)


if __name__ == "__main__":
    leave(guarded(main))
