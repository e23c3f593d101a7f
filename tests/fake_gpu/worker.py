"""Runs fake steps in a process of its own: a case per line of the input as JSON, a result per line of the output.

echo '{"config": "ds_configs/fsdp.json", "processes": 2}' | python -m tests.fake_gpu.worker
"""

from __future__ import annotations

import json
import sys
import time
import traceback

from tests.fake_gpu.step import run_step, self_test  # isort: skip  before anything that imports torch
from tests.fake_gpu.cells import Case

SELF_TEST = "selftest"
"""In the place of a config: mistakes that must be seen."""


def main() -> None:
    """Entry point."""
    for line in sys.stdin:
        began = time.monotonic()
        fields = json.loads(line)
        try:
            run = self_test if fields["config"] == SELF_TEST else run_step
            result = {"report": run(Case(**{**fields, "overrides": tuple(fields.get("overrides", ()))}))}
        except Exception as error:
            ours = [f for f in traceback.extract_tb(error.__traceback__) if "/pipeline/" in f.filename]
            where = f" at pipeline/{ours[-1].filename.rpartition('/pipeline/')[2]}:{ours[-1].lineno}" if ours else ""
            deepest = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{deepest.filename.rpartition('/site-packages/')[2]} {deepest.name}: {deepest.line}"
            text = " ".join(str(error).split())[:500] or at
            result = {"error": f"{type(error).__name__}{where}: {text}", "traceback": traceback.format_exc()}
        result["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
