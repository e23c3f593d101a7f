"""The worker of fake steps with a first step that the kernel kills and a second one that ends."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from dataclasses import asdict
from typing import Any

from pipeline.fake_gpu import worker
from pipeline.fake_gpu.case import Case


def step(case: Case) -> dict[str, Any]:
    """Ends by SIGKILL as one process, and returns as several."""
    if case.processes == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"peak": 1}


if __name__ == "__main__":
    # imported there, not defined
    worker.run_step = step  # type: ignore[attr-defined]
    sys.stdin = io.StringIO("".join(json.dumps(asdict(Case("run.json", count))) + "\n" for count in (1, 2)))
    worker.main()
