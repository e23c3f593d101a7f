"""Trains a step in layouts whose layers Inductor cannot compile; the last rank writes what the user is told.

Every rank runs failing_compile.py CASES.json RESULTS.json, where a case is a dict of config keys. Activations named
`fails_forward` and `fails_backward` have an operator that can be traced and whose lowering raises.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.lowering import register_lowering
from transformers.activations import ACT2FN

from foundation.errors import ConfigError
from tests.engines.layout_worker import make_engine, resolved, step_batch


@torch.library.custom_op("headrace_tests::not_lowered", mutates_args=())
def not_lowered(x: Tensor) -> Tensor:
    """What Inductor cannot compile: a copy."""
    return x.clone()


@torch.library.custom_op("headrace_tests::not_lowered_backward", mutates_args=())
def not_lowered_backward(x: Tensor) -> Tensor:
    """A copy whose gradient Inductor cannot compile."""
    return x.clone()


for operator in (not_lowered, not_lowered_backward):
    operator.register_fake(torch.empty_like)
    operator.register_autograd(lambda _context, gradient: not_lowered(gradient))


@register_lowering(torch.ops.headrace_tests.not_lowered.default, type_promotion_kind=None)
def _lowering(_x: Any) -> Any:
    raise NotImplementedError("no kernel for this operator")


class FailsForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return not_lowered(x)


class FailsBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return not_lowered_backward(x)


def told(case: dict[str, Any]) -> str:
    torch._dynamo.reset()
    run = resolved(case, processes=dist.get_world_size())
    engine = make_engine(run)
    try:
        engine.train_step(step_batch(run, 1), lr=1e-3)
    except ConfigError as error:
        return str(error)
    return "nothing"


def main() -> None:
    ACT2FN.update(fails_forward=FailsForward, fails_backward=FailsBackward)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = {name: told(case) for name, case in json.loads(Path(sys.argv[1]).read_text()).items()}
    # of a pipeline, the other rank waits for gradients that never come
    if dist.get_rank() == dist.get_world_size() - 1:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
