"""Derives DeepSpeed's own config from a resolved run, without the duties of the training loop."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.deepspeed import ZeroSection

_NEVER = 1 << 62
"""Steps between DeepSpeed's progress lines; its default is 10, but the training loop already logs these numbers."""


def deepspeed_config(run: ResolvedRun) -> dict[str, Any]:
    """Makes DeepSpeed's config for a resolved run.

    The optimizer, the scheduler and W&B are left out. The engine passes its own optimizer, and the loop sets learning
    rates and writes metrics, so that both engines behave alike. At stage 0 our optimizer has the fp32 master weights,
    clips gradients and scales the loss (see `deepspeed.replicated`), so DeepSpeed does not get bf16, fp16 and clipping.
    """
    config, stage = run.config, run.config.zero_optimization.stage
    derived: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": run.batch.micro,
        "gradient_accumulation_steps": run.batch.accumulation,
        "gradient_clipping": config.gradient_clipping if stage > 0 else 0.0,  # DeepSpeed's default is 1.0
        "zero_optimization": _zero_section(config.zero_optimization, run_dir=str(config.run.local_dir)),
        # DeepSpeed's default is the model's dtype
        "communication_data_type": config.communication_data_type,
        "wall_clock_breakdown": config.wall_clock_breakdown,
        "steps_per_print": config.steps_per_print or _NEVER,
        # with sequence parallelism every tp rank sends different positions, so there is nothing to partition and gather
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,  # SGD, Lion: tests/engines/test_layouts.py
    }
    if stage > 0:
        derived["bf16"] = {"enabled": config.bf16.enabled}
        derived["data_types"] = {"grad_accum_dtype": config.data_types.grad_accum_dtype or "fp32"}
        # a static scale, which the engine overrides in every step, by the same rule at every stage
        derived["fp16"] = {"enabled": config.fp16.enabled, "loss_scale": 1.0}
    aio = config.aio.model_dump(exclude_none=True)
    return {**derived, "aio": aio} if aio else derived


def _zero_section(zero: ZeroSection, *, run_dir: str) -> dict[str, Any]:
    section = zero.model_dump(exclude_none=True)
    for key in ("offload_optimizer", "offload_param"):
        if section[key]["device"] == "none":
            del section[key]
        elif section[key]["device"] == "nvme":
            section[key]["nvme_path"] = str(swap_folder(run_dir, section[key]["nvme_path"]))
    return section


def swap_folder(run_dir: str, disk: str) -> Path:
    """Returns the run's own folder for NVMe offload: DeepSpeed names files only by rank, and runs may share a disk."""
    name = hashlib.sha256(str(Path(run_dir).absolute()).encode()).hexdigest()[:12]
    return Path(disk) / f"headrace-{name}"
