"""The start of a rank: refuses features that its node or device lacks, then connects the ranks."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.build import pick_device
from pipeline.engines.deepspeed.machine import check_machine
from pipeline.engines.parallel.compilation import compiles
from pipeline.engines.parallel.fp8 import check_fp8_device, experts_in_fp8
from pipeline.engines.parallel.fused_kernels import check_exchange_device
from pipeline.engines.parallel.mesh import Mesh, build_mesh
from pipeline.models.flash_attention import check_flash_attention
from pipeline.run.memory_checkpoints import memory_folder
from pipeline.run.preflight import preflight
from pipeline.run.prepare import PreparedRun, prepare
from pipeline.run.resume import check_shared
from pipeline.run.staged_data import check_stage_space, open_cache
from pipeline.run.uneven.balance_shares import check_compiled_shares
from pipeline.run.uneven.measure_stages import MeasuredStages, measure_stages
from pipeline.runtime.launch import Launch, Rendezvous, process_group
from pipeline.runtime.launch.device import bind_to_gpu, has_gpu, set_up_allocator


def check_and_prepare(run: ResolvedRun, launch: Launch) -> tuple[PreparedRun, torch.device, list[str]]:
    """Checks and opens config, data, model, node and device; an error leaves everything untouched.

    Returns:
        The run, this rank's device, and notes for people.
    """
    gpu = has_gpu(run.config.launch)
    prepared = prepare(run)
    for stage in prepared.stages or (prepared,):
        check_node(stage)
    notes = prepared.notes + set_up_allocator(gpu=gpu)
    device = pick_device(launch, run.config.launch)
    for stage in prepared.stages or (prepared,):
        check_device(stage, device)
    return prepared, device, notes + bind_to_gpu(device.index, run.config.launch)


def check_node(prepared: PreparedRun) -> None:
    """Refuses features that this node lacks, before process groups are opened."""
    config = prepared.run.config
    if config.engine == "deepspeed":
        check_machine(config.zero_optimization, config.fp16)
    check_stage_space(config.data, prepared.mixture)
    open_cache(prepared.run, prepared.mixture)
    if config.islands or config.replicas:
        from pipeline.run.groups.islands.build import check_island  # noqa: PLC0415

        check_island(config.islands)
        check_island(config.replicas, field="replicas")
    memory_folder(config.run)


def check_device(prepared: PreparedRun, device: torch.device) -> None:
    """Refuses features that this rank's device cannot compute."""
    run, fp8 = prepared.run, prepared.run.config.fp8
    check_fp8_device(fp8, device, experts=experts_in_fp8(fp8, prepared.model))
    check_exchange_device(run, device)
    check_flash_attention(run.config.model.attn_implementation, device)
    check_compiled_shares(run, compiled=compiles(run.config.compile))


def connect(
    prepared: PreparedRun, launch: Launch, device: torch.device, stack: ExitStack
) -> tuple[Rendezvous | None, Mesh | None, str | None, MeasuredStages | None]:
    """Opens the process groups and checks them by all-reduces; a single process of our own engines has none.

    Returns:
        The rendezvous of all ranks, this rank's process groups, the pre-flight check's line for people, and the speeds
        of pipeline stages if the config asks to measure them.
    """
    run = prepared.run
    if run.alone:
        return None, None, None, None
    rendezvous = stack.enter_context(process_group(launch, gpu=device.index, config=run.config.launch))
    mesh, summary = None, None
    if rendezvous.world_size > 1:
        mesh, summary = preflight(rendezvous, partial(_make_mesh, run, device), device=device)
    check_shared(prepared.run_dir, rendezvous)
    return rendezvous, mesh, summary, measure_stages(run, prepared.model, rendezvous, device)


def _make_mesh(run: ResolvedRun, device: torch.device) -> Mesh:
    mesh = build_mesh(run.topology, device_type=device.type, shard_size=run.shard_size, node=run.node_size)
    assert mesh is not None  # only the reference has no mesh
    return mesh
