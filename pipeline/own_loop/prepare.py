"""`prepare`: wraps a user's model, optimizer and loader for distributed training in a custom loop."""

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

from foundation.errors import ConfigError
from pipeline.config.schedule import make_schedule
from pipeline.config.topology import Topology
from pipeline.engines.build import pick_device
from pipeline.engines.common import update_scales
from pipeline.engines.optim.build import build_optimizer
from pipeline.engines.optim.groups import parameter_groups
from pipeline.engines.parallel.mesh import Mesh
from pipeline.own_loop.batchnorm import synchronize_batchnorm
from pipeline.own_loop.config import LoopConfig, load_loop_config, share
from pipeline.own_loop.elementwise import check_elementwise
from pipeline.own_loop.engine import LoopEngine, Parts, PreparedOptimizer
from pipeline.own_loop.loader import batch_size_of, distribute
from pipeline.own_loop.torch_scheduler import refuse_second_schedule, take_over
from pipeline.run.preflight import preflight
from pipeline.runtime.launch import Launch, Rendezvous, detect, process_group
from pipeline.runtime.launch.device import bind_to_gpu, has_gpu, set_up_allocator


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loader: Iterable[Any] | None = None,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    scheduler: Any = None,
) -> tuple[LoopEngine, Any, Any]:
    """Returns the replacements of model, optimizer and loader in the loop. Collective.

    Args:
        model: any module, with its weights; those of rank 0 are broadcast.
        optimizer: a torch optimizer of the model's parameters; the config's if None.
        loader: a torch DataLoader, or an iterable of batches that is the same on every rank.
        config: a JSON file or its content; None for the command line (`--config FILE --set KEY=VALUE`).
        scheduler: a torch scheduler of the optimizer, which the engine steps once per optimizer step; None for no
            scheduler.

    Returns:
        The engine, called like the model; an optimizer with the engine's `step`; this rank's loader.

    Raises:
        ConfigError: the config is invalid or does not fit the arguments; or the layout would shard an optimizer that
            uses whole tensors.
        TrainingError: a rank is missing or does not respond.
    """
    checked, launch = load_loop_config(config), detect()
    size = None if loader is None else batch_size_of(loader)
    batch_share = share(checked, loader_batch=size, ranks=launch.world_size, rank=launch.rank)
    optimizer = _optimizer(checked, model, optimizer)
    _check_optimizer(checked, optimizer, ranks=launch.world_size)
    if scheduler is not None:
        take_over(scheduler)
    schedule = None
    if checked.scheduler is not None:
        if scheduler is not None:
            why = "a torch scheduler is passed, too"
            raise ConfigError("scheduler.type", checked.scheduler.type, why=why, remedy="use one of the two")
        refuse_second_schedule(checked.scheduler.type, optimizer)
        schedule = make_schedule(checked.scheduler, lr=float(optimizer.param_groups[0]["lr"]), steps=None)
    _quiet_libraries(launch)
    notes = set_up_allocator(gpu=has_gpu(checked.launch))
    device = pick_device(launch, checked.launch)
    for line in notes + bind_to_gpu(device.index, checked.launch) if launch.rank == 0 else []:
        print(line, flush=True)
    mesh = _join(checked, launch, device)
    _synchronize(model, checked, device, mesh)
    parts = Parts(checked, model, optimizer, scheduler, schedule, batch_share, device)
    engine = _engine(parts, mesh)
    shared = None if loader is None else distribute(loader, batch_share, device=device, say=engine.print)
    return engine.train(), PreparedOptimizer(engine, optimizer), shared


def _optimizer(config: LoopConfig, model: nn.Module, given: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    if given is not None:
        if config.optimizer is not None:
            why = "a torch optimizer is passed, too"
            raise ConfigError("optimizer.type", config.optimizer.type, why=why, remedy="use one of the two")
        return given
    if config.optimizer is None:
        why = "there is neither this section nor a torch optimizer"
        raise ConfigError("optimizer", why=why, remedy='add "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}')
    params = config.optimizer.params
    groups = parameter_groups(dict(model.named_parameters()), update_scales(model), params)
    # torch's fused SGD needs momentum of all parameters at once, and a user's model may leave some out of a step
    return build_optimizer(groups, config.optimizer, lr=params.lr, fused=config.optimizer.kind.states_need is None)


def _check_optimizer(config: LoopConfig, optimizer: torch.optim.Optimizer, *, ranks: int) -> None:
    """Refuses an optimizer that the layout shards although it is not element-wise."""
    half = config.bf16.enabled or config.fp16.enabled
    stage = config.zero_optimization.stage
    if config.engine == "deepspeed" and half:
        stage = max(stage, 1)  # DeepSpeed flattens parameters on one rank, too
    if config.engine == "torch" and ranks == 1:
        stage = 0
    check_elementwise(optimizer, engine=config.engine, stage=stage, half=half)


def _join(config: LoopConfig, launch: Launch, device: torch.device) -> Mesh | None:
    """Opens the process group until the process ends and runs the pre-flight check; None for one process."""
    topology = Topology(dp=launch.world_size)
    if dist.is_initialized():  # an earlier call opened it, or the user's code
        return Mesh(topology, device_type=device.type) if launch.world_size > 1 else None
    if launch.world_size == 1 and config.engine == "torch":
        return None
    stack = ExitStack()
    rendezvous: Rendezvous = stack.enter_context(process_group(launch, gpu=device.index, config=config.launch))
    # gloo has been seen to abort at exit if it is left open
    atexit.register(stack.close)
    if launch.world_size == 1:
        return None
    mesh, line = preflight(rendezvous, lambda: Mesh(topology, device_type=device.type), device=device)
    if launch.rank == 0:
        print(f"{launch}; {line}", flush=True)
    return mesh


@torch.no_grad()
def _synchronize(model: nn.Module, config: LoopConfig, device: torch.device, mesh: Mesh | None) -> None:
    """Moves the model to the device, broadcasts rank 0's weights, and synchronizes BatchNorm over ranks."""
    model.to(device)
    half = config.engine == "deepspeed" and (config.bf16.enabled or config.fp16.enabled)
    if config.engine == "torch" and mesh is not None:  # FSDP2 gathers weights in bf16
        half = config.bf16.enabled and config.zero_optimization.stage > 0
    if mesh is None:
        if half:
            synchronize_batchnorm(model, None, half=True)
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, src=0)
    # a separate process group: its all-reduces must not interleave with DDP's buckets
    synchronize_batchnorm(model, dist.new_group(), half=half)


def _engine(parts: Parts, mesh: Mesh | None) -> LoopEngine:
    if parts.config.engine == "torch":
        from pipeline.own_loop.torch_engine import TorchLoop  # noqa: PLC0415

        return TorchLoop(parts, mesh)
    from pipeline.own_loop.deepspeed_engine import DeepSpeedLoop  # noqa: PLC0415  imports for seconds

    return DeepSpeedLoop(parts)


def _quiet_libraries(launch: Launch) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    for name in ("DeepSpeed", "deepspeed", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING if launch.rank == 0 else logging.ERROR)
