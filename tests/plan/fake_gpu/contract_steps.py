"""Executes steps of small layouts, and prints as JSON for each its messages to other ranks, or its error.

Both ranks of a pipeline at ZeRO stage 3, rank 0 without the remedy of `prefetch_explicitly` (FSDP2's own prefetch in
the first unit), ring attention, and weights that stay sharded over a node (hpZ).
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from pipeline.plan.fake_gpu import step, worker  # isort: skip  before torch
from torch.distributed.fsdp import FSDPModule

from pipeline.plan.fake_gpu.case import StepCase
from pipeline.plan.fake_gpu.recorder import StepRecorder

_PIPELINE = StepCase("ds_configs/fsdp_3d.json", 8, vocabulary=4096)
_SMALL = ("bf16.enabled=true", "model.config.num_hidden_layers=2")
_RING = (*_SMALL, "parallel.cp=2", "parallel.cp_method=ring")
_NODES = (*_SMALL, "zero_optimization.stage=3", "zero_optimization.zero_hpz_partition_size=4")
CASES = {
    "first": _PIPELINE,
    "last": replace(_PIPELINE, pp_rank=1),
    "as FSDP2": _PIPELINE,
    "ring": StepCase("ds_configs/fsdp.json", 4, vocabulary=4096, overrides=_RING),
    "hpZ": StepCase("ds_configs/fsdp.json", 8, vocabulary=4096, overrides=_NODES),
}


def run(case: StepCase, *, remedy: bool) -> dict[str, Any]:
    """In the place of `run_step`: returns a rank's messages."""
    recorders: list[StepRecorder] = []
    prefetch = FSDPModule.set_modules_to_backward_prefetch

    def recorder(*args: Any, **options: Any) -> StepRecorder:
        recorders.append(StepRecorder(*args, **options))
        return recorders[-1]

    def without_remedy(module: Any, modules: Any) -> None:
        prefetch(module, [each for each in modules if each is not module])

    with ExitStack() as stack:
        stack.enter_context(patch.object(step, "StepRecorder", recorder))
        if not remedy:
            stack.enter_context(patch.object(FSDPModule, "set_modules_to_backward_prefetch", without_remedy))
        step.run_step(case)
    return {"messages": recorders[0]._submissions.messages}


if __name__ == "__main__":
    for name, case in CASES.items():
        with patch.object(worker, "run_step", partial(run, remedy=name != "as FSDP2")):
            print(json.dumps({"name": name, **worker._forked(case)}))
