"""Builds the engine of a run, and picks the device. The engines do not import each other; only the chosen one loads."""

from __future__ import annotations

import torch
from torch import nn

from foundation.errors import ConfigError
from foundation.quick_imports import quick_imports
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.run import LaunchSection
from pipeline.engines.base import Engine, Objective
from pipeline.engines.parallel.mesh import Mesh, build_mesh
from pipeline.models.construction.initial_values import ParameterValues
from pipeline.models.grouped_products import leaves_idle_experts, zero_idle_experts
from pipeline.runtime.launch import Launch
from pipeline.runtime.launch.device import has_gpu


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
        model: the full model, on meta.
        values: initial values of the model's parameters; a checkpoint loaded later replaces them.
        objective: the loss.
        device: this rank's device.
        mesh: this rank's coordinates and process groups, if they exist already.
    """
    if device.type == "cuda" and leaves_idle_experts(device):
        zero_idle_experts(model)
    mesh = mesh or build_mesh(run.topology, device_type=device.type, shard_size=run.shard_size, node=run.node_size)
    if run.plain:
        from pipeline.engines.torch_native.reference import TorchReference  # noqa: PLC0415

        return TorchReference(run, model, values, objective, device=device)
    if run.config.engine == "torch":
        if run.alone:
            from pipeline.engines.torch_native.single import TorchSingle  # noqa: PLC0415

            return TorchSingle(run, model, values, objective, device=device, mesh=None)
        from pipeline.engines.torch_native.parallel import TorchParallel  # noqa: PLC0415

        assert mesh is not None
        return TorchParallel(run, model, values, objective, device=device, mesh=mesh)
    if run.topology.pp > 1:
        with quick_imports():
            from pipeline.engines.deepspeed.pipeline import DeepSpeedPipeline  # noqa: PLC0415

        assert mesh is not None
        return DeepSpeedPipeline(run, model, values, objective, device=device, mesh=mesh)
    with quick_imports():
        from pipeline.engines.deepspeed.zero import DeepSpeedZero  # noqa: PLC0415  imports for seconds

    return DeepSpeedZero(run, model, values, objective, device=device, mesh=mesh)


def pick_device(launch: Launch, config: LaunchSection | None = None) -> torch.device:
    """Returns this rank's GPU if the host has one, else the CPU.

    Args:
        launch: this process.
        config: the section `launch`; None for commands without it.

    Raises:
        ConfigError: this host has fewer GPUs than local ranks, or `has_gpu` raises.
    """
    if not has_gpu(config):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if launch.local_rank >= count > 1:
        why = f"this host has {count} GPUs, and a process with local rank {launch.local_rank} was started on it"
        raise ConfigError("LOCAL_RANK", launch.local_rank, why=why, remedy=f"start at most {count} processes per host")
    # if each task sees only its own GPU, its index is 0 for every local rank
    device = torch.device("cuda", launch.local_rank % count)
    torch.cuda.set_device(device)
    return device
