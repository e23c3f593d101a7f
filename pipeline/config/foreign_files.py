"""Configs and keys of other tools: recognised by their keys, named, and translated to a run's config."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foundation.errors import ConfigError
from pipeline.config.foreign_names import find_name, same_key
from pipeline.config.sections.run import Config

_FEW = 10
_REASONS = 3
"""Most reasons in a message why keys of another tool have no counterpart here."""
BASE = "ds_configs/zero3.json"
"""The shipped config on which a remedy builds."""
_CARRIED = (
    *("parallel.pp", "parallel.tp", "parallel.cp", "train_micro_batch_size_per_gpu", "train_batch_size"),
    *("gradient_accumulation_steps", "gradient_clipping", "optimizer.params.lr", "optimizer.params.weight_decay"),
    *("data.sequence_length", "run.steps", "run.seed", "run.dir", "run.checkpoint_every", "run.keep_checkpoints"),
    "evaluation.every",
)
"""Keys whose values a remedy carries over from another tool's file."""


@dataclass(frozen=True)
class Tool:
    """Another tool, described by the config that it reads.

    Attributes:
        name: the tool.
        marks: groups of top-level keys; the tool's config has all keys of at least one group.
        instead: remedy for a config whose keys cannot be carried over; empty where they can.
    """

    name: str
    marks: tuple[frozenset[str], ...]
    instead: str = ""


def _tool(name: str, *marks: str, instead: str = "") -> Tool:
    return Tool(name, tuple(frozenset(each.split()) for each in marks), instead)


TOOLS = (
    _tool("accelerate", "compute_environment distributed_type", "distributed_type num_machines num_processes"),
    _tool("GPT-NeoX", "pipe_parallel_size model_parallel_size", "num_layers pos_emb", "train_iters lr_decay_style"),
    _tool("NeMo", "trainer exp_manager", "trainer model name"),
    _tool("LLaMA-Factory", "model_name_or_path finetuning_type", "model_name_or_path template dataset"),
    _tool("axolotl", "base_model datasets", "base_model sequence_len", "base_model micro_batch_size"),
    _tool("torchtitan", "job training", "training parallelism", "metrics training optimizer lr_scheduler"),
    _tool("nanotron", "general parallelism tokens", "checkpoints general tokenizer"),
    _tool("OLMo", "save_folder device_train_microbatch_size", "run_name save_folder global_train_batch_size"),
    _tool("LLM Foundry", "train_loader max_seq_len", "train_loader max_duration"),
    _tool("torchtune", "tokenizer checkpointer loss", "checkpointer optimizer epochs"),
    _tool("the Hugging Face Trainer", "output_dir per_device_train_batch_size", "output_dir num_train_epochs"),
    _tool(
        "transformers (config.json of a model)",
        "model_type architectures",
        "model_type hidden_size",
        instead='give its folder as "model": {"path": ...} in a run\'s config',
    ),
)


def refuse_foreign(raw: Mapping[str, Any], path: str) -> None:
    """Refuses a config of another tool, and tells which values can be carried over.

    Args:
        raw: the parsed file.
        path: path of the file, for the message.

    Raises:
        ConfigError: the config is another tool's; the error names the tool and a command with its values.
    """
    keys = frozenset(_plain(key) for key in raw)
    if {"data", "run"} <= keys:  # a file of ours with a few keys of another tool: each is reported
        keys -= Config.model_fields.keys()
        if len(keys) <= _FEW:
            return
    tool = next((tool for tool in TOOLS if any(marks <= keys for marks in tool.marks)), None)
    if tool is None:
        return
    marks = max((each for each in tool.marks if each <= keys), key=len)
    why = f"it is a config of {tool.name} (it has {', '.join(sorted(marks))}), not of a run here"
    absent = {found.no.partition(";")[0] for key, value in _leaves(raw) if value and (found := find_name(key))}
    why += "".join(f"; {reason}" for reason in sorted(absent - {""})[:_REASONS])
    raise ConfigError("--config", path, why=why, remedy=tool.instead or _conversion_remedy(raw))


def _conversion_remedy(raw: Mapping[str, Any]) -> str:
    """Returns a remedy: a command line with the values under our keys, after any DeepSpeed file named in the config."""
    found: dict[str, object] = {}
    deepspeed = ""
    for key, value in _leaves(raw):
        ours = same_key(key)
        if ours in _CARRIED and ours not in found and _is_plain(value):
            found[ours] = value
        if key in ("deepspeed", "deepspeed_config_file") and isinstance(value, str):
            deepspeed = value
    ramp = next((value for key, value in _leaves(raw) if _plain(key) == "rampup_batch_size" and value), None)
    if ramp is not None:
        found["train_batch_size"] = _ramp(
            ramp, to=found.get("train_batch_size"), length=found.get("data.sequence_length")
        )
    sets = "".join(f" --set {shlex.quote(f'{key}={_word(value)}')}" for key, value in found.items())
    start = f"headrace check --config {BASE}{sets}, then your model and data in a file of your own"
    return f'add "model", "data" and "run" to {deepspeed}, its DeepSpeed file; or {start}' if deepspeed else start


def _ramp(given: Any, *, to: Any, length: Any) -> dict[str, Any]:
    """Writes Megatron's `rampup_batch_size` (start, increment, samples), which has the same batch at every step here.

    A number that cannot be computed is a text that says what to write.
    """
    numbers: tuple[Any, Any, Any] = ("START", "INCREMENT", "SAMPLES x data.sequence_length")
    try:
        start, by, samples = (int(each) for each in (given.split() if isinstance(given, str) else given))
        numbers = (start, by, samples * int(length))
    except (TypeError, ValueError):
        pass
    return {"from": numbers[0], "to": to or "the global batch size", "by": numbers[1], "over_tokens": numbers[2]}


def _leaves(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield str(key), value


def _is_plain(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return number or (isinstance(value, str) and 0 < len(value) < 80 and "://" not in value and "$" not in value)


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _plain(key: object) -> str:
    return str(key).replace("-", "_")
