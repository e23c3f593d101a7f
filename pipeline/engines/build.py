"""Which engine executes a run. The two families are strangers: only the chosen one is imported."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.config.rules import ResolvedRun
from pipeline.engines.base import Engine, Objective
from pipeline.launch import Launch
from pipeline.models.values import ParameterValues


def build_engine(
    run: ResolvedRun, model: nn.Module, values: ParameterValues, objective: Objective, *, device: torch.device
) -> Engine:
    """Builds the engine that the config names. Collective.

    Args:
        run: the resolved config.
        model: on meta.
        values: first values of its parameters; a checkpoint loaded later replaces them.
        objective: what is minimised.
        device: of this rank.
    """
    if run.config.engine == "torch":
        if run.plain:
            from pipeline.engines.torch_reference import TorchReference  # noqa: PLC0415

            return TorchReference(run, model, values, objective, device=device)
        from pipeline.engines.torch_parallel import TorchParallel  # noqa: PLC0415

        return TorchParallel(run, model, values, objective, device=device)
    if run.topology.pp > 1:
        from pipeline.engines.deepspeed_pipeline import DeepSpeedPipeline  # noqa: PLC0415

        return DeepSpeedPipeline(run, model, values, objective, device=device)
    from pipeline.engines.deepspeed_zero import DeepSpeedZero  # noqa: PLC0415  imports for seconds

    return DeepSpeedZero(run, model, values, objective, device=device)


def pick_device(launch: Launch) -> torch.device:
    """This rank's GPU where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
