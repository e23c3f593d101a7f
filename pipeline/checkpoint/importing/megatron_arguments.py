"""Checks the Megatron arguments that affect the mathematics: their allowed values, or the config fields they become.

`megatron_arguments.json` has the arguments of Megatron-LM 0.13.1, 0.16.1 and 2026-08-22 (892 names in `arguments.py`):

    model, model of ..., experts    another value makes another model of the same weights: refused
    training                        another value changes the next losses: named, with the run's behavior
    harmless                        logs, paths, layouts, speed; and what shapes, names or `fields_of` compare

An argument that is not listed is harmless if it is off (false, none, 0, empty); otherwise it is named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from foundation.errors import CheckpointError

_GPT2 = "gpt2"
_ROPE_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of `--use-rope-scaling` in Megatron's code."""


def check_arguments(folder: Path, arguments: Any, config: Mapping[str, Any]) -> list[str]:
    """Refuses arguments that mean another model; lists those that only change the next losses.

    Args:
        folder: folder of the checkpoint, for messages.
        arguments: Megatron's arguments, as attributes; older versions may lack some.
        config: the Hugging Face config of the run's model.

    Returns:
        Texts for `SourceCheckpoint.left_out`.

    Raises:
        CheckpointError: the config's model does not support some arguments; names all of them.
    """
    table, given = _table(), getattr(arguments, "__dict__", {})
    of = "model of gpt2" if config.get("model_type") == _GPT2 else "model of rotary families"
    allowed = table["model"] | table[of] | (table["experts"] if given.get("num_experts") else {})
    lines = [
        f"    {name} = {given[name]!r}; the config's model has {' or '.join(map(repr, values))}"
        for name, values in allowed.items()
        if not _is_one_of(given.get(name, values[0]), values)
    ]
    if _window(arguments) is not None and "sliding_window" not in config:
        lines.append(f"    window_size = {arguments.window_size!r}; a {config.get('model_type')} has no sliding window")
    if lines:
        listed = "\n".join(lines)
        raise CheckpointError(
            f"{folder} was trained with arguments of Megatron that make another model of the same weights:\n{listed}\n"
            "  try: convert it to a Hugging Face folder with Megatron Bridge, and take the weights, as model.path"
        )
    return [*_other_training(given), *_unknown(given)]


def fields_of(arguments: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Converts Megatron's arguments to those fields of a Hugging Face config that `config` also has."""
    heads = getattr(arguments, "num_attention_heads", None)
    grouped = getattr(arguments, "group_query_attention", False)
    untied = getattr(arguments, "untie_embeddings_and_output_weights", None)
    epsilon = getattr(arguments, "norm_epsilon", getattr(arguments, "layernorm_epsilon", None))  # 0.13, 0.16
    theirs: dict[str, Any] = {
        "num_attention_heads": heads,
        "n_head": heads,
        "num_key_value_heads": getattr(arguments, "num_query_groups", None) if grouped else heads,
        "head_dim": getattr(arguments, "kv_channels", None),
        "rms_norm_eps": epsilon,
        "layer_norm_epsilon": epsilon,
        "num_experts_per_tok": getattr(arguments, "moe_router_topk", None),
        "hidden_act": "silu" if getattr(arguments, "swiglu", False) else None,
        "activation_function": _activation(arguments, config.get("activation_function")),
        "tie_word_embeddings": None if untied is None else not untied,
    }
    if (base := getattr(arguments, "rotary_base", None)) and isinstance(config.get("rope_parameters"), Mapping):
        kind: dict[str, Any] = {"rope_type": "default"}
        if getattr(arguments, "use_rope_scaling", False):
            factor = float(getattr(arguments, "rope_scaling_factor", 8.0))
            kind = {"rope_type": "llama3", "factor": factor, **_ROPE_SCALING}
        theirs["rope_parameters"] = {**config["rope_parameters"], "rope_theta": float(base), **kind}
    found = {key: value for key, value in theirs.items() if value is not None and config.get(key) is not None}
    if hasattr(arguments, "window_size") and "sliding_window" in config:
        found["sliding_window"] = _window(arguments)
    return found


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return found | {"harmless": frozenset(" ".join(found["harmless"]).split())}


def _is_one_of(value: Any, allowed: list[Any]) -> bool:
    """Whether every value is allowed; some arguments have one value per layer or per kind."""
    return all(each in allowed for each in (value if isinstance(value, list | tuple) and value else [value]))


def _window(arguments: Any) -> int | None:
    """Returns the attention window as Hugging Face counts it, a token itself included; None for no window."""
    window = getattr(arguments, "window_size", None)
    return int(window[0]) + 1 if window and int(window[0]) >= 0 else None


def _other_training(given: Mapping[str, Any]) -> Iterator[str]:
    for name, (values, ours) in _table()["training"].items():
        of_another = name.startswith("muon_") and "muon" not in str(given.get("optimizer"))
        without = name.startswith("moe_") and not given.get("num_experts")
        if name in given and not of_another and not without and not _is_one_of(given[name], values):
            yield f"{name} = {given[name]!r} of Megatron: {ours}"


def _unknown(given: Mapping[str, Any]) -> Iterator[str]:
    table = _table()
    known = table["harmless"].union(*(names for key, names in table.items() if key != "harmless"))
    names = [name for name, value in sorted(given.items()) if name not in known and not _is_off(value)]
    if names:
        listed = ", ".join(f"{name} = {str(given[name])[:40]}" for name in names)
        yield f"arguments of Megatron that are not known here, and may decide the next losses: {listed}"


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in (0, "", [], (), {})


def _activation(arguments: Any, ours: str | None) -> str | None:
    """Returns the Hugging Face name of Megatron's GELU: `ours` if it computes the same function."""
    if not hasattr(arguments, "openai_gelu"):
        return None
    approximate = arguments.openai_gelu or getattr(arguments, "bias_gelu_fusion", False)
    same = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast") if approximate else ("gelu",)
    return ours if ours is not None and ours in same else same[0]
