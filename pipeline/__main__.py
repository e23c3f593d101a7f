"""`python -m pipeline VERB`: what `headrace VERB` does, where the command is not on PATH."""

from __future__ import annotations

import sys

from foundation.cli import leave
from foundation.command_line import Parser, add_verbs, execute
from foundation.verbs import VERBS


def main() -> int:
    """Parses the command line and runs the verb; only the chosen verb's module is imported."""

    def declare(parser: Parser) -> None:
        add_verbs(parser, VERBS)

    return execute(sys.argv[1:], prog="python -m pipeline", declare=declare, description=__doc__)


if __name__ == "__main__":
    leave(main())
