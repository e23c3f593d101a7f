"""Runs the checks of `make guard`, one line for each; `--only NAME` runs one.

`--store` replaces `expected.json` by what is found, and `--make-fixture COMMIT` the run that a commit began: both where
a change of a curve, a row or a format is meant.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.guard import begun
from tests.guard.checks import EXPECTED, OTHERS, STORED, against_stored


def main() -> int:
    """Entry point; 1 when a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.guard", description=__doc__)
    parser.add_argument("--only", choices=[*STORED, *OTHERS], help="run one check")
    parser.add_argument("--store", action="store_true", help="store what is found")
    parser.add_argument("--make-fixture", metavar="COMMIT", help="begin the run of the fixture with a commit's code")
    asked = parser.parse_args()
    if asked.make_fixture:
        begun.make(asked.make_fixture)
        return 0
    failed = [name for name in [*STORED, *OTHERS] if asked.only in (None, name) and not _passes(name, asked.store)]
    if failed:
        print("where the change is meant: --store for what is stored, --make-fixture COMMIT for the run that was begun")
    return int(bool(failed))


def _passes(name: str, store: bool) -> bool:
    began, outcome = time.monotonic(), "ok"
    with tempfile.TemporaryDirectory(prefix="headrace-guard-") as folder:
        try:
            if name in OTHERS:
                text = OTHERS[name](Path(folder))
            else:
                found = STORED[name](Path(folder))
                if store:
                    kept = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
                    EXPECTED.write_text(json.dumps({**kept, name: found}, indent=1) + "\n")
                text = against_stored(name, found)
        except AssertionError as error:
            outcome, text = "FAILED", str(error)
    print(f"{outcome:6} {name} ({time.monotonic() - began:.0f} s): {text}", flush=True)
    return outcome == "ok"


if __name__ == "__main__":
    sys.exit(main())
