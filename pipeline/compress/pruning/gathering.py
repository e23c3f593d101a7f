"""Gathers importance on all processes, in one process group, once a target latency has given the shape."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from foundation.errors import ConfigError
from pipeline.compress.pruning.axes import GROUPS, LAYERS
from pipeline.compress.pruning.importance import Sums, Windows, add_up, gather
from pipeline.compress.pruning.layout import data_ranks
from pipeline.compress.pruning.rules import PruningPlan
from pipeline.compress.pruning.search import Shape, search
from pipeline.compress.pruning.sharded import gather_sharded, open_model
from pipeline.compress.pruning.stored_sums import fingerprint, load_sums, needs_loss, save_sums
from pipeline.data.loader import heldout_batches
from pipeline.engines.build import pick_device
from pipeline.models.folder import loading
from pipeline.models.folder.loading import load_model
from pipeline.runtime.launch.environment import Launch
from pipeline.runtime.launch.group import process_group
from pipeline.runtime.launch.rendezvous import Rendezvous
from pipeline.runtime.launch.wait_for_rank_zero import wait_for_rank_zero

_REPEATS = 7
"""Passes of each of the two models, alternating; the fastest pass counts, as disturbances change it least."""


@dataclass(frozen=True)
class Importance:
    """Shape and importance, known before anything is cut.

    Attributes:
        plan: plan with a shape.
        sums: sums over all processes; may be empty on ranks other than 0.
        latency: forward time of the shape, as a share of the original's; None if the target is not a latency.
    """

    plan: PruningPlan
    sums: Sums
    latency: float | None


def find_importance(plan: PruningPlan, launch: Launch) -> Importance:
    """Finds the shape, and loads the sums of an earlier start or gathers them on all processes. Collective.

    Raises:
        ConfigError: the latency cannot be met, or the architecture does not support the layout; on all ranks.
        LostError: rank 0 died while it measured.
    """
    device = pick_device(launch)
    if launch.world_size == 1:
        shape, latency = _shape(plan)
        plan = replace(plan, shape=shape)
        mark = fingerprint(plan)
        sums = load_sums(plan, mark) or gather_here(plan, launch, None)
    else:
        model = None if plan.layout is None else open_model(plan.layout)
        with process_group(launch, gpu=device.index) as rendezvous:  # sums go over gloo, a sharded model over nccl
            shape, latency = _shape(plan, rendezvous)
            plan = replace(plan, shape=shape)
            mark = fingerprint(plan)
            sums = _gather_together(plan, launch, model, mark)
    if launch.rank == 0:
        save_sums(plan, sums, mark)
    return Importance(plan, sums, latency)


def _shape(plan: PruningPlan, rendezvous: Rendezvous | None = None) -> tuple[Shape, float | None]:
    if plan.shape is not None:
        return plan.shape, None
    if rendezvous is None or rendezvous.rank == 0:
        Console(stderr=True).print("measuring forward passes for the target latency")
    if rendezvous is None:
        return shape_for_latency(plan)
    return wait_for_rank_zero(lambda: shape_for_latency(plan), rendezvous, what="measuring latencies")


def _gather_together(plan: PruningPlan, launch: Launch, model: nn.Module | None, mark: str) -> Sums:
    """Loads or gathers the sums; rank 0 decides, as it may be the only one that sees the directory. Collective."""
    stored = load_sums(plan, mark) if launch.rank == 0 else None
    there = torch.tensor([stored is not None])
    dist.broadcast(there, 0)
    return (stored or {}) if there.item() else add_up(gather_here(plan, launch, model))


def gather_here(plan: PruningPlan, launch: Launch, model: nn.Module | None) -> Sums:
    """Gathers this process's part of the sums.

    Args:
        plan: plan of the pruning.
        launch: launch of this process.
        model: model on the meta device, if processes share one; None otherwise.
    """
    device, loss = pick_device(launch), needs_loss(plan)
    batches = list(windows_of(plan, launch))
    if plan.layout is not None:
        assert model is not None
        sums = gather_sharded(plan.layout, model, batches, device=device, depth_loss=loss)
        tokens = plan.config.calibration.samples * plan.config.data.sequence_length if launch.rank == 0 else 0
        return sums | {"tokens": torch.tensor([tokens], dtype=torch.float64)}
    console = Console(stderr=True)
    hidden = launch.rank > 0 or not console.is_terminal
    shown = track(batches, "importance", len(batches), console=console, disable=hidden)
    whole = load_model(plan.source.path, dtype=torch.float32, device=device)
    return gather(whole, shown, device=device, depth_loss=loss)


def windows_of(plan: PruningPlan, launch: Launch) -> Iterator[Windows]:
    """This process's batches, equal in number and shape on all processes."""
    data, samples, layout = plan.config.data, plan.config.calibration.samples, plan.layout
    dp = data_ranks(layout, world_size=launch.world_size)
    place = {"dp": launch.rank, "cp": 0} if layout is None else layout.topology.coordinates(launch.rank)
    cut = {} if layout is None else {"cp": layout.topology.cp, "cp_rank": place["cp"], "zigzag": layout.zigzag}
    part = {"dp": dp, "dp_rank": place["dp"], "mask_documents": data.mask_documents, **cut}
    batches = heldout_batches(plan.calibration, batch_size=data.batch_size, samples=samples, **part)  # type: ignore[arg-type]
    for number, batch in enumerate(batches):
        first = (number * dp + place["dp"]) * data.batch_size
        yield Windows(batch, min(max(samples - first, 0), data.batch_size))


def shape_for_latency(plan: PruningPlan) -> tuple[Shape, float]:
    """Finds a shape whose forward time is at most `target.latency` of the original's; returns shape and share.

    The search only tries one ratio for all axes: differences between neighbouring shapes are below the noise.

    Raises:
        ConfigError: even the smallest sizes take longer; the message has their share.
    """
    assert plan.choices is not None
    limit = plan.config.target.latency
    assert limit is not None
    measured: dict[tuple[int, ...], float] = {}

    def cost(shape: Mapping[str, int]) -> float:
        key = tuple(shape[axis] for axis in plan.anatomy.sizes)
        if key not in measured:
            measured[key] = 1.0 if dict(shape) == dict(plan.anatomy.sizes) else measure_ratio(plan, shape)
        return measured[key]

    found = search(plan.choices, cost, limit, grow=False)
    if found is None:
        least = cost(plan.choices.smallest)
        why = f"at the smallest sizes a forward pass still takes {least:.2f} of the original's time here"
        more = "" if LAYERS in plan.choices.allowed else ", or add num_hidden_layers to axes"
        near = f"{least * 1.1:.2f} or more, " if least * 1.1 < 1 else ""
        remedy = f"use {near}a smaller multiple_of{more}"
        raise ConfigError("target.latency", limit, why=why, remedy=remedy)
    return plan.anatomy.completed(found), cost(found)


@torch.inference_mode()
def measure_ratio(plan: PruningPlan, shape: Mapping[str, int]) -> float:
    """Measures the time of a forward pass over data.batch_size windows, as a share of the original's."""
    device = loading.pick_device()
    models = [_random(plan, plan.anatomy.completed(sizes), device) for sizes in (plan.anatomy.sizes, shape)]
    batch = (plan.config.data.batch_size, plan.config.data.sequence_length)
    ids = torch.zeros(batch, dtype=torch.int64, device=device)
    times: list[list[float]] = [[], []]
    for _ in range(_REPEATS):
        for model, taken in zip(models, times, strict=True):
            began = time.perf_counter()
            model(input_ids=ids, use_cache=False).logits[0, 0, 0].item()  # waits for the device
            taken.append(time.perf_counter() - began)
    original, pruned = (min(each) for each in times)
    return pruned / original


def _random(plan: PruningPlan, sizes: Mapping[str, int], device: torch.device) -> Any:
    """A model of these sizes with random weights: time does not depend on them."""
    config = AutoConfig.from_pretrained(plan.source.path, local_files_only=True, trust_remote_code=False)
    for axis, size in sizes.items():
        setattr(config, plan.anatomy.keys[axis], size)
    if GROUPS in sizes and not plan.anatomy.architecture.heads_of_hidden:
        config.num_attention_heads = config.num_attention_heads // plan.anatomy.sizes[GROUPS] * sizes[GROUPS]
        config.head_dim = plan.anatomy.head_size
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = kinds[: sizes[LAYERS]]
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, plan.dtype)).to(device).eval()
