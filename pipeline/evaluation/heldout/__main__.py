"""`python -m pipeline.evaluation.heldout MODEL --data TOKENS`: the evaluation as a subprocess of other stages."""

from __future__ import annotations

import sys

from foundation.cli import guarded
from foundation.command_line import Parser
from pipeline.evaluation.heldout import command


def main() -> int:
    """Parses the arguments of `eval` and runs it."""
    parser = Parser(prog="python -m pipeline.evaluation.heldout", description=command.__doc__)
    command.add_arguments(parser)
    return command.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(guarded(main))
