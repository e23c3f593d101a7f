"""`prepare`: from a model, an optimizer and a loader of one's own to an engine that runs them in a layout."""

from __future__ import annotations

import atexit
import logging
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headrace.base.errors import ConfigError
from pipeline.config.schedule import schedule_from_section
from pipeline.engines.build import pick_device
from pipeline.engines.common import decayed_names, weight_decay_groups
from pipeline.launch import Launch, Rendezvous, detect, process_group
from pipeline.own_loop.batchnorm import synchronise
from pipeline.own_loop.config import LoopConfig, load_loop_config, share
from pipeline.own_loop.engine import LoopEngine, Parts, PreparedOptimizer
from pipeline.own_loop.loader import batch_size_of, share_out
from pipeline.parallel.mesh import Mesh
from pipeline.run.preflight import preflight
from pipeline.topology import Topology


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loader: Iterable[Any] | None = None,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    scheduler: Any = None,
) -> tuple[LoopEngine, Any, Any]:
    """Gives back what takes the places of model, optimizer and loader in the loop. Collective.

    Args:
        model: any module, with its weights; rank 0's are everybody's.
        optimizer: over the model's parameters; AdamW from the config's section when None.
        loader: a torch DataLoader, or an iterable of batches that is the same on every rank.
        config: a JSON file or its content; from the command line (`--config FILE --set KEY=VALUE`) when None.
        scheduler: a torch scheduler of the optimizer, stepped by the engine once per update; or the config's section.

    Returns:
        The engine, which is called like the model; an optimizer whose `step` is the engine's; the loader of this rank.

    Raises:
        ConfigError: the config cannot run, or does not fit what it was given.
        TrainingError: a rank did not come or does not answer.
    """
    checked, launch = load_loop_config(config), detect()
    size = None if loader is None else batch_size_of(loader)
    cut = share(checked, loader_batch=size, ranks=launch.world_size, rank=launch.rank)
    optimizer = _optimizer(checked, model, optimizer)
    schedule = None
    if checked.scheduler is not None:
        if scheduler is not None:
            why = "there is a torch scheduler too"
            raise ConfigError("scheduler.type", checked.scheduler.type, why=why, remedy="use one of the two")
        schedule = schedule_from_section(checked.scheduler, lr=float(optimizer.param_groups[0]["lr"]), steps=None)
    _quiet(launch)
    device = pick_device(launch)
    mesh = _join(checked, launch, device)
    _alike(model, checked, device, mesh)
    parts = Parts(checked, model, optimizer, scheduler, schedule, cut, device)
    engine = _engine(parts, mesh)
    shared = None if loader is None else share_out(loader, cut, device=device, say=engine.print)
    return engine.train(), PreparedOptimizer(engine, optimizer), shared


def _optimizer(config: LoopConfig, model: nn.Module, given: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    if given is not None:
        if config.optimizer is not None:
            why = "there is a torch optimizer too"
            raise ConfigError("optimizer.type", config.optimizer.type, why=why, remedy="use one of the two")
        return given
    if config.optimizer is None:
        why = "there is neither this section nor a torch optimizer"
        raise ConfigError("optimizer", why=why, remedy='add "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}')
    params = config.optimizer.params
    groups = weight_decay_groups(dict(model.named_parameters()), decayed_names(model), weight_decay=params.weight_decay)
    used = [group for group in groups if group["params"]]
    return torch.optim.AdamW(used, lr=params.lr, betas=params.betas, eps=params.eps)


def _join(config: LoopConfig, launch: Launch, device: torch.device) -> Mesh | None:
    """Opens the process group for the life of this process, and lets every rank answer; None for one process."""
    topology = Topology(dp=launch.world_size)
    if dist.is_initialized():  # by an earlier call, or by the loop itself
        return Mesh(topology, device_type=device.type) if launch.world_size > 1 else None
    if launch.world_size == 1 and config.engine == "torch":
        return None
    stack = ExitStack()
    meeting: Rendezvous = stack.enter_context(process_group(launch, gpu=device.index, config=config.launch))
    # left open, gloo was seen to abort at exit
    atexit.register(stack.close)
    if launch.world_size == 1:
        return None
    mesh, line = preflight(meeting, lambda: Mesh(topology, device_type=device.type), device=device)
    if launch.rank == 0:
        print(f"{launch}; {line}", flush=True)
    return mesh


@torch.no_grad()
def _alike(model: nn.Module, config: LoopConfig, device: torch.device, mesh: Mesh | None) -> None:
    """Moves the model, gives every rank the weights of rank 0, and lets BatchNorm see all ranks' samples."""
    model.to(device)
    half = config.engine == "deepspeed" and (config.bf16.enabled or config.fp16.enabled)
    if mesh is None:
        if half:
            synchronise(model, None, half=True)
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, src=0)
    # a group of its own: its sums must not fall between the buckets that DDP sends
    synchronise(model, dist.new_group(), half=half)


def _engine(parts: Parts, mesh: Mesh | None) -> LoopEngine:
    if parts.config.engine == "torch":
        from pipeline.own_loop.torch_engine import TorchLoop  # noqa: PLC0415

        return TorchLoop(parts, mesh)
    from pipeline.own_loop.deepspeed_engine import DeepSpeedLoop  # noqa: PLC0415  imports for seconds

    return DeepSpeedLoop(parts)


def _quiet(launch: Launch) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    for name in ("DeepSpeed", "deepspeed", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING if launch.rank == 0 else logging.ERROR)
