"""A check that starts trainings, with a fault put into one of their ranks; prints its findings as JSON lines.

python -m tests.headrace.doctor.ranks.launched CHECK FOLDER CONFIG FAULT ALL LIMIT_S
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from foundation.errors import HeadraceError
from headrace.doctor.check import Context


def main() -> None:
    name, work, config, fault, everything, limit_s = sys.argv[1:]
    if fault:
        from tests.headrace.doctor.ranks.faults import FAULTS  # noqa: PLC0415

        FAULTS[fault]()
    context = Context(Path(config) if config else None, (), Path(work), everything == "all", float(limit_s))
    try:
        with redirect_stdout(sys.stderr):
            found = [asdict(each) for each in import_module(f"headrace.doctor.checks.{name}").run(context)]
    except HeadraceError as error:  # the runner makes a finding of it (`headrace.doctor.rank`)
        found = [{"passed": False, "text": str(error)}]
    for each in found:
        print(json.dumps(each))


if __name__ == "__main__":
    main()
