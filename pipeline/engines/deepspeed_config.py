"""The config DeepSpeed sees: derived from ours, complete, and nothing that the loop does itself."""

from __future__ import annotations

from typing import Any

from pipeline.config.rules import ResolvedRun


def deepspeed_config(run: ResolvedRun) -> dict[str, Any]:
    """DeepSpeed's config for a resolved run.

    The optimizer, the scheduler and W&B are left out: the engine brings its optimizer, the loop sets learning rates
    and writes metrics, so that both engines do it alike.
    """
    config = run.config
    zero = config.zero_optimization.model_dump(exclude_none=True)
    made: dict[str, Any] = {
        "train_batch_size": run.batch.samples,
        "train_micro_batch_size_per_gpu": run.batch.micro,
        "gradient_accumulation_steps": run.batch.accumulation,
        "gradient_clipping": config.gradient_clipping,
        "zero_optimization": zero,
        "bf16": {"enabled": config.bf16.enabled},
        "data_types": {"grad_accum_dtype": config.data_types.grad_accum_dtype or "fp32"},
        "wall_clock_breakdown": config.wall_clock_breakdown,
        # DeepSpeed logs every 10 steps unless told otherwise; our own progress line says it already
        "steps_per_print": config.steps_per_print or 1 << 62,
    }
    return made
