"""Executes steps in a process of its own: reads a case per line and writes a result per line, both as JSON.

echo '{"config": "ds_configs/fsdp.json", "processes": 2}' | python -m pipeline.plan.fake_gpu.worker

Torch is imported once; a fork executes each case. In one process a second layout would use the process groups of the
first, which are destroyed: DeepSpeed keeps its groups in globals of its modules, and torch's caches of DTensor
operators return specs with the mesh of an earlier, equal layout. The parent computes nothing and has no second thread.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from pipeline.plan.fake_gpu.step import run_step  # isort: skip  before anything that imports torch
from foundation.errors import HeadraceError
from foundation.processes import die_with_parent
from pipeline.plan.fake_gpu.case import StepCase
from pipeline.plan.fake_gpu.contracts import BrokenContractError

_PACKAGE = Path(__file__).parents[2]


def main() -> None:
    """Executes the cases of the input."""
    for line in sys.stdin:
        began = time.monotonic()
        fields = json.loads(line)
        result = _forked(StepCase(**{**fields, "overrides": tuple(fields["overrides"])}))
        result["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(result), flush=True)


def _forked(case: StepCase) -> dict[str, Any]:
    """The result of a case, executed by a fork of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _execute(case, reader, writer)
    os.close(writer)
    with os.fdopen(reader) as results:
        text = results.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if text and not code:
        result: dict[str, Any] = json.loads(text)
        return result
    why = signal.Signals(-code).name if code < 0 else f"code {code}"
    return {"error": f"the process that executed the step ended early ({why})", "traceback": ""}


def _execute(case: StepCase, reader: int, writer: int) -> NoReturn:
    """Executes a case in the fork, writes its result to the pipe and ends the process without the parent's cleanup."""
    code = 1
    try:
        die_with_parent()  # a caller that stops waiting ends the parent
        os.close(reader)
        os.dup2(2, 1)  # libraries print to standard output, which must have results only
        try:
            result: dict[str, Any] = {"report": run_step(case)}
        except Exception as error:
            result = {"error": _with_line(error), "traceback": traceback.format_exc()}
            if isinstance(error, BrokenContractError):
                result["contract"] = error.contract.name
        with os.fdopen(writer, "w") as results:
            results.write(json.dumps(result))
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _with_line(error: Exception) -> str:
    """The text of an error, with the project line that raised it."""
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
