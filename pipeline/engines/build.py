"""Which engine executes a run. The two families are strangers: only the chosen one is imported."""

from __future__ import annotations

import torch
from torch import nn

from headrace.base.errors import ConfigError
from pipeline.config.rules import ResolvedRun
from pipeline.engines.base import Engine, Objective
from pipeline.launch import Launch
from pipeline.models.values import ParameterValues
from pipeline.parallel.mesh import Mesh, mesh_of


def build_engine(
    run: ResolvedRun,
    model: nn.Module,
    values: ParameterValues,
    objective: Objective,
    *,
    device: torch.device,
    mesh: Mesh | None = None,
) -> Engine:
    """Builds the engine that the config names. Collective.

    Args:
        run: the resolved config.
        model: on meta.
        values: first values of its parameters; a checkpoint loaded later replaces them.
        objective: what is minimised.
        device: of this rank.
        mesh: this rank's place and groups, where they have been made already.
    """
    mesh = mesh or mesh_of(run, device.type)
    if run.config.engine == "torch":
        if run.plain:
            from pipeline.engines.torch_native.reference import TorchReference  # noqa: PLC0415

            return TorchReference(run, model, values, objective, device=device)
        from pipeline.engines.torch_native.parallel import TorchParallel  # noqa: PLC0415

        assert mesh is not None
        return TorchParallel(run, model, values, objective, device=device, mesh=mesh)
    if run.topology.pp > 1:
        from pipeline.engines.deepspeed.pipeline import DeepSpeedPipeline  # noqa: PLC0415

        assert mesh is not None
        return DeepSpeedPipeline(run, model, values, objective, device=device, mesh=mesh)
    from pipeline.engines.deepspeed.zero import DeepSpeedZero  # noqa: PLC0415  imports for seconds

    return DeepSpeedZero(run, model, values, objective, device=device, mesh=mesh)


def pick_device(launch: Launch) -> torch.device:
    """This rank's GPU where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    seen = torch.cuda.device_count()
    if launch.local_rank >= seen > 1:
        why = f"this host has {seen} GPUs, and a process with local rank {launch.local_rank} was started on it"
        raise ConfigError("LOCAL_RANK", launch.local_rank, why=why, remedy=f"start at most {seen} processes per host")
    # where each task sees only its own GPU, that is number 0 whatever the local rank
    device = torch.device("cuda", launch.local_rank % seen)
    torch.cuda.set_device(device)
    return device
