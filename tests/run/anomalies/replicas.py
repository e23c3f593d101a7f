"""Replica check before and after one bit of a rank's weights is flipped. replicas.py CASES.json RESULTS.json."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foundation.errors import TrainingError
from pipeline.run.anomalies.replicas import check_replicas
from tests.engines.layout_worker import make_engine, resolved, step_batch


def flip(values: Tensor) -> None:
    """Flips the lowest bit of one element."""
    bits = values.view(-1).view({2: torch.int16, 4: torch.int32}[values.element_size()])
    bits[bits.numel() // 2] ^= 1


def check(engine: Any, step: int) -> str:
    """The error of the replica check; empty without one."""
    try:
        check_replicas(engine.replicas(), step=step)
    except TrainingError as error:
        return str(error)
    return ""


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """The check of a trained engine, and of the same engine with a flipped bit on `rank` in `name`."""
    rank, name = case.pop("rank"), case.pop("name")
    run = resolved(case, processes=dist.get_world_size())
    engine = make_engine(run)
    for step in (1, 2):
        engine.train_step(step_batch(run, step), lr=1e-3)
    names = sorted({replica.name for replica in engine.replicas()})
    before = check(engine, 2)
    if dist.get_rank() == rank:
        flip(next(replica.values for replica in engine.replicas() if replica.name == name))
    return {"names": names, "before": before, "after": check(engine, 2)}


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    results = {}
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        results_of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results_of_ranks, run_case(case))
        results[name] = results_of_ranks
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
