"""The worker of fake steps with steps that the kernel kills, that end, and that hang."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

from pipeline.plan.fake_gpu import worker
from pipeline.plan.fake_gpu.case import StepCase


def step(case: StepCase) -> dict[str, Any]:
    """Ends by SIGKILL as one process, returns as two, and tells its process id and hangs as three."""
    if case.processes == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if case.processes == 3:
        print(os.getpid(), file=sys.stderr, flush=True)
        time.sleep(600)
    return {"peak": 1}


if __name__ == "__main__":
    sys.stdin = io.StringIO("".join(json.dumps(asdict(StepCase("run.json", int(n)))) + "\n" for n in sys.argv[1:]))
    with patch.object(worker, "run_step", step):
        worker.main()
