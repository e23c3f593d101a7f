"""`python pipeline/quantize.py --config F`: quantization of a trained model to 8 or 4 bits.

model/ or a run -> model-int4/: evaluated on the held-out split, quantized, written beside its final name, scored by the
programs that serve it, and only then renamed. See docs/how-to/quantization.md.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from foundation.cli import add_config_arguments, guarded
from foundation.configfile import load
from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.quantization.rules import prepare
from pipeline.compress.quantization.trained import model_folder


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
    raw = load(arguments.config, arguments.overrides)
    _refuse_old_key(raw)
    config = parse(QuantizeConfig, raw)
    with model_folder(config) as folder:
        plan = prepare(config, folder=folder)

        from pipeline.compress.quantization.run import quantize  # noqa: PLC0415  (brings in torch)

        quantize(plan)
    return 0


def _refuse_old_key(raw: dict[str, Any]) -> None:
    """Refuses the old key `weights`, now `scheme`, which also names the format of activations."""
    given = raw.get("weights")
    if given is not None and "scheme" not in raw:
        new = {"int4": '"scheme": "W4A16"'}.get(given, '"scheme": "W8A8", which vLLM serves, or "W8A16", as before')
        raise ConfigError("weights", given, why="this key is now scheme", remedy=new)


if __name__ == "__main__":
    sys.exit(guarded(main))
