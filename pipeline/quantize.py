"""`python pipeline/quantize.py --config F`: weight-only quantization of a trained model to 8 or 4 bits.

model/ -> model-int4/: loaded, evaluated on the held-out split, quantized, written beside its final name, evaluated
again in a subprocess, and only then renamed. See docs/how-to/quantization.md.
"""

from __future__ import annotations

import argparse
import sys

from headrace.base.cli import add_config_arguments, guarded
from headrace.base.configfile import load
from headrace.base.section import parse
from pipeline.compress.config import QuantizeConfig
from pipeline.compress.rules import prepare


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="quantize.py", description=__doc__.splitlines()[0])
    add_arguments(parser)
    return run(parser.parse_args())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Checks and runs the config; torch is imported only after the checks."""
    plan = prepare(parse(QuantizeConfig, load(arguments.config, arguments.overrides)))

    from pipeline.compress.run import quantize  # noqa: PLC0415  (brings in torch)

    quantize(plan)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
