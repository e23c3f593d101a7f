"""Names of metrics in trackers that group them by the part before the slash: W&B, TensorBoard, MLflow.

| group | metrics |
|---|---|
| `loss/` | `train`, `held_out`, `held_out/SOURCE` and the parts of the loss |
| `optimizer/` | learning rate, gradient norm, loss scale, skipped steps |
| `speed/` | tokens/s, MFU, seconds |
| `memory/` | peaks of the allocator or of the process |
| `data/` | samples and tokens so far, wait for the batch, the student's own samples |
| `moe/` | load of the experts |
| `eval/`, `task/NAME/` | other numbers of evaluations and of tasks |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.runtime.metrics.sinks import HELD_OUT, SOURCES

_GROUPS = {
    "optimizer": ("lr", "grad_norm", "loss_scale", "skipped", "largest_attention_logit", "clipped_heads"),
    "speed": ("tokens_per_second", "mfu", "seconds", "compile_seconds"),
    "data": ("samples", "tokens", "data_wait_seconds", "on_policy_share", "generated_tokens", "generation_seconds"),
    "moe": ("load_balance_loss",),
    "memory": ("allocator_retries",),
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}
_PREFIXES = {"memory_": "memory", "expert_": "moe", "generation_": "data", "sampled_": "speed"}
_HELD_OUT = {"loss": "loss/held_out", "ema_loss": "loss/held_out_ema"}


def scalars(values: Mapping[str, Any]) -> dict[str, int | float]:
    """Returns a row's numbers; those of an object in it under "key/name", as the held-out loss of every source."""
    found: dict[str, int | float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{key}/{name}": each for name, each in scalars(value).items()}
        elif isinstance(value, int | float):
            found[key] = value
    return found


def tagged(kind: str, values: Mapping[str, Any]) -> dict[str, int | float]:
    """Returns a row's numbers under their tags.

    Args:
        kind: kind of the row: "step", "eval" or "task/NAME".
        values: the row.
    """
    return {_tag(kind, name): value for name, value in scalars(values).items()}


def _tag(kind: str, name: str) -> str:
    if kind == HELD_OUT:
        source = name.removeprefix(f"{SOURCES}/")
        return _HELD_OUT.get(name, f"eval/{name}" if source == name else f"loss/held_out/{source}")
    if kind != "step":
        return f"{kind}/{name}"
    if name == "loss":
        return "loss/train"
    prefix = next((each for each in _PREFIXES if name.startswith(each)), None)
    group = _GROUP_OF.get(name) or (_PREFIXES[prefix] if prefix else "loss")
    return f"{group}/{name.removeprefix('memory_')}"


OVERVIEW = {
    "Overview": {
        "loss": ["Multiline", ["loss/train", "loss/held_out$"]],
        "held-out loss by source": ["Multiline", ["loss/held_out/.*"]],
        "tokens/s": ["Multiline", ["speed/tokens_per_second"]],
        "MFU": ["Multiline", ["speed/mfu"]],
        "gradient norm": ["Multiline", ["optimizer/grad_norm"]],
        "memory": ["Multiline", ["memory/.*_bytes"]],
    }
}
"""TensorBoard's page "Custom Scalars": the plots to look at first, in their order, by regular expressions of tags."""
