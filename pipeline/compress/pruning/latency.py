"""Forward time of a shape relative to the original's, measured on this machine with random weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.base.errors import ConfigError
from pipeline.compress.pruning.axes import GROUPS, LAYERS
from pipeline.compress.pruning.rules import PruningPlan
from pipeline.compress.pruning.search import Shape, search
from pipeline.models.folder.loading import pick_device

_REPEATS = 7
"""Passes of each of the two models, alternating; the fastest counts, as disturbances change it least."""


def shape_for_latency(plan: PruningPlan) -> tuple[Shape, float]:
    """Finds a shape whose forward time is at most `target.latency` of the original's; returns it and its share.

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
    device = pick_device()
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
