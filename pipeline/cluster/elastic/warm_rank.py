"""A process that has done a rank's imports and waits to become one: `python -m pipeline.cluster.elastic.warm_rank`.

It waits for one line on standard input, a JSON object: `environ`, the rank's environment, and `output`, the file to
which it appends (null: its present output). It then runs the module of ARGS as `python -m` does. It ends at the end of
its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys

from foundation.errors import HeadraceError
from pipeline.config.load import load_config
from pipeline.run.preload import preload
from pipeline.runtime.launch.arguments import parse_arguments


def main() -> int:
    """Imports a rank's modules, waits for the line, and becomes the rank."""
    module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    _import()
    line = sys.stdin.readline()
    if not line:
        return 0
    order = json.loads(line)
    os.environ.clear()
    os.environ.update(order["environ"])
    if order["output"] is not None:
        file = os.open(order["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _import() -> None:
    """Imports the modules that the run of this config needs; the rank reports a refused config."""
    with contextlib.suppress(HeadraceError, OSError, SystemExit):
        given = parse_arguments("")
        config = load_config(given.config, given.overrides)
        kinds = [kind for kind in [(config.model.config or {}).get("model_type")] if kind]
        preload(
            ["pipeline.run.session", "pipeline.run.hooks.measured", "pipeline.engines.objective"],
            [config.engine],
            kinds,
        )


if __name__ == "__main__":
    sys.exit(main())
