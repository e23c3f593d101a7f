"""Executes steps in a process of its own: a case per line of the input as JSON, a result per line of the output.

echo '{"config": "ds_configs/fsdp.json", "processes": 2}' | python -m pipeline.fake_gpu.worker
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from pipeline.fake_gpu.step import run_step  # isort: skip  before anything that imports torch
from headrace.base.errors import HeadraceError
from pipeline.fake_gpu.case import Case

_PACKAGE = Path(__file__).parents[1]


def main() -> None:
    """Entry point."""
    for line in sys.stdin:
        began = time.monotonic()
        fields = json.loads(line)
        try:
            result: dict[str, Any] = {"report": run_step(Case(**{**fields, "overrides": tuple(fields["overrides"])}))}
        except Exception as error:
            result = {"error": _told(error), "traceback": traceback.format_exc()}
        result["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(result), flush=True)


def _told(error: Exception) -> str:
    """An error with the line of this project where it happened."""
    if isinstance(error, HeadraceError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f"{Path(f.filename).relative_to(_PACKAGE.parent)}:{f.lineno}" for f in frames if _is_ours(f.filename)]
    text = " ".join(str(error).split())[:500] or f"{frames[-1].name}: {frames[-1].line}"
    return f"{type(error).__name__}{f' at {ours[-1]}' if ours else ''}: {text}"


def _is_ours(filename: str) -> bool:
    return _PACKAGE in Path(filename).parents and Path(__file__).parent not in Path(filename).parents


if __name__ == "__main__":
    main()
