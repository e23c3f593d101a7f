"""The config DeepSpeed sees: derived from ours, complete, and nothing that the loop does itself."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pipeline.config.rules import ResolvedRun

_NEVER = 1 << 62
"""Steps between DeepSpeed's own progress lines; it logs every 10 unless told otherwise, and ours says it already."""


def deepspeed_config(run: ResolvedRun) -> dict[str, Any]:
    """DeepSpeed's config for a resolved run.

    The optimizer, the scheduler and W&B are left out: the engine brings its optimizer, the loop sets learning rates
    and writes metrics, so that both engines do it alike. At stage 0 the engine's optimizer keeps the fp32 weights,
    clips and scales the loss (see `deepspeed_replicated`), and DeepSpeed is not told of bf16, fp16 and clipping.
    """
    config, stage = run.config, run.config.zero_optimization.stage
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": run.batch.micro,
        "gradient_accumulation_steps": run.batch.accumulation,
        "gradient_clipping": config.gradient_clipping if stage > 0 else 0.0,  # left out, it would be 1.0
        "zero_optimization": _zero(run),
        # gradients are added up over ranks and over micro-batches in fp32, whatever the model's dtype
        "communication_data_type": "fp32",
        "wall_clock_breakdown": config.wall_clock_breakdown,
        "steps_per_print": config.steps_per_print or _NEVER,
        # with sequence parallelism every tp rank sends its own positions: there is nothing to cut up and join
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "zero_force_ds_cpu_optimizer": False,
    }
    if stage > 0:
        made["bf16"] = {"enabled": config.bf16.enabled}
        made["data_types"] = {"grad_accum_dtype": config.data_types.grad_accum_dtype or "fp32"}
        # a fixed scale: the engine sets the real one, by the same rule at every stage
        made["fp16"] = {"enabled": config.fp16.enabled, "loss_scale": 1.0}
    aio = config.aio.model_dump(exclude_none=True)
    return {**made, "aio": aio} if aio else made


def _zero(run: ResolvedRun) -> dict[str, Any]:
    made = run.config.zero_optimization.model_dump(exclude_none=True)
    for key in ("offload_optimizer", "offload_param"):
        if made[key]["device"] == "none":
            del made[key]
        elif made[key]["device"] == "nvme":
            made[key]["nvme_path"] = str(swap_folder(run, made[key]["nvme_path"]))
    return made


def swap_folder(run: ResolvedRun, disk: str) -> Path:
    """Where a run swaps to: its own folder. DeepSpeed names files by rank alone, and two runs may share a disk."""
    name = hashlib.sha256(str(Path(run.config.run.dir).absolute()).encode()).hexdigest()[:12]
    return Path(disk) / f"headrace-{name}"
