"""From the fields that decide a curve to the config keys that a person writes, which `run.allow_change` takes."""

from __future__ import annotations

_LENGTH = ("run.steps", "run.tokens")
_WRITTEN: dict[str, tuple[str, ...]] = {
    "scheduler.kind": ("scheduler.type",),
    "scheduler.peak": ("optimizer.params.lr", "scheduler.params.warmup_max_lr"),
    "scheduler.floor": (
        "scheduler.params.warmup_min_lr",
        "scheduler.params.warmup_min_ratio",
        "optimizer.params.lr",
    ),
    "scheduler.warmup": ("scheduler.params.warmup_num_steps", *_LENGTH),
    "scheduler.log_warmup": ("scheduler.params.warmup_type", "scheduler.type"),
    "scheduler.total": (*_LENGTH, "scheduler.params.total_num_steps"),
    "scheduler.decay": ("scheduler.params.decay_num_steps", *_LENGTH),
    "scheduler.end_ratio": ("scheduler.params.min_ratio", "scheduler.params.cos_min_ratio"),
    "data.weights": ("data.sources",),
    "data.budgets": ("data.sources", *_LENGTH),
    "grad_accum_dtype": ("data_types.grad_accum_dtype",),
    "bf16": ("bf16.enabled",),
    "fp16": ("fp16.enabled",),
    "fp8": ("fp8.recipe", "fp8.enabled"),
    "model.resolved": ("model.config", "model.path"),
}
"""Curve field -> the keys that it follows from, the most likely first. Fields that are not here are keys themselves."""
_FINGERPRINT = ".fingerprint"


def written_keys(field: str) -> tuple[str, ...]:
    """The config keys that a field of the curve, or one inside it, follows from; the most likely first."""
    if field.endswith(_FINGERPRINT):
        return (field.removesuffix(_FINGERPRINT),)
    for derived, keys in _WRITTEN.items():
        if f"{field}.".startswith(f"{derived}."):
            return keys
    return (field,)


def is_allowed(field: str, name: str) -> bool:
    """Whether a name in `run.allow_change` covers a field of the curve: by its own path or by a key it follows from."""
    return any(f"{key}.".startswith(f"{name}.") for key in (field, *written_keys(field)))
