"""What must hold between fields, checked before a process group, a GPU or a byte of output is touched.

`resolve` is the one way from a parsed `Config` to something that can run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError
from pipeline.config.batch import Batch, resolve_batch
from pipeline.config.schedule import Schedule, make_schedule
from pipeline.config.schema import Config
from pipeline.topology import Topology


@dataclass(frozen=True)
class ResolvedRun:
    """A config that may run, with everything that follows from it and the number of processes."""

    config: Config
    topology: Topology
    batch: Batch
    steps: int
    schedule: Schedule

    @property
    def plain(self) -> bool:
        """It is the reference: one process, Hugging Face's own forward pass, no layout."""
        return self.config.engine == "torch" and self.topology.world_size == 1

    @property
    def stages_per_rank(self) -> int:
        """Pieces of the model that one pipeline rank holds."""
        return self.config.parallel.stages_per_rank or 1


def resolve(config: Config, *, world_size: int) -> ResolvedRun:
    """Checks the rules and derives layout, batch, steps and schedule.

    Raises:
        ConfigError: on the first rule that is broken.
    """
    _check_model(config)
    _check_engine(config)
    topology = topology_of(config, world_size=world_size)
    batch = resolve_batch(config, dp=topology.dp)
    steps = _steps(config, batch)
    return ResolvedRun(config, topology, batch, steps, make_schedule(config, steps=steps))


def topology_of(config: Config, *, world_size: int) -> Topology:
    """The mesh: pp, cp and tp as the config says, dp what is left of the processes.

    DeepSpeed's own keys for an axis mean the same as ours; only one of the two may be given, or both alike.

    Raises:
        ConfigError: two keys contradict each other, or the processes cannot be divided so.
    """
    parallel = config.parallel
    theirs = {
        "pp": ("pipeline.stages", config.pipeline.stages),
        "tp": ("tensor_parallel.autotp_size", config.tensor_parallel.autotp_size),
        "cp": ("sequence_parallel_size", config.sequence_parallel_size),
    }
    sizes: dict[str, int] = {}
    for axis, (key, value) in theirs.items():
        ours = getattr(parallel, axis)
        if ours is not None and value is not None and ours != value:
            raise ConfigError(f"parallel.{axis}", ours, why=f"{key} says {value}", remedy="give one of the two")
        sizes[axis] = ours or value or 1
    model_ranks = sizes["pp"] * sizes["tp"] * sizes["cp"]
    if world_size % model_ranks:
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        near = max(1, world_size // model_ranks) * model_ranks
        why = f"{world_size} processes are not a multiple of {model_ranks} ({product})"
        remedy = f"start {near} or {near + model_ranks} processes, or change the section"
        raise ConfigError("parallel", why=why, remedy=remedy)
    return Topology(dp=world_size // model_ranks, **sizes)


def curve_fields(run: ResolvedRun) -> dict[str, Any]:
    """The fields that decide which curve a run follows; layout, logging and checkpointing are not among them.

    A run may be resumed only where these are unchanged. Paths are not among them either: what lies there is compared
    by fingerprint.
    """
    config = run.config.model_dump(mode="json")
    weights = [source["weight"] for source in config["data"]["sources"]]
    distill = config["distill"] and {k: v for k, v in config["distill"].items() if k != "teacher"}
    return {
        "model": {key: config["model"][key] for key in ("config", "fresh", "keep_layers")},
        "data": {"weights": weights, "sequence_length": config["data"]["sequence_length"]},
        "distill": distill,
        "train_batch_size": run.batch.samples,
        "optimizer": config["optimizer"],
        "scheduler": run.schedule.describe(),
        "gradient_clipping": config["gradient_clipping"],
        "bf16": config["bf16"]["enabled"],
        "grad_accum_dtype": config["data_types"]["grad_accum_dtype"] or "fp32",
        "run.seed": config["run"]["seed"],
    }


def _steps(config: Config, batch: Batch) -> int:
    run = config.run
    if (run.steps is None) == (run.tokens is None):
        why = "neither is given" if run.steps is None else "both are given"
        raise ConfigError("run.steps / run.tokens", why=why, remedy="give exactly one of the two")
    if run.steps is not None:
        return run.steps
    assert run.tokens is not None
    return math.ceil(run.tokens / batch.tokens)


def _check_model(config: Config) -> None:
    model = config.model
    if (model.config is None) == (model.path is None):
        why = "neither is given" if model.config is None else "both are given"
        raise ConfigError("model.config / model.path", why=why, remedy="give exactly one of the two")
    if model.config is not None:
        for key in ("fresh", "keep_layers"):
            if getattr(model, key):
                why = "it only means something for a model that is loaded"
                raise ConfigError(f"model.{key}", getattr(model, key), why=why, remedy="remove it, or use model.path")
        check_model_config(model.config, sequence_length=config.data.sequence_length)


def check_model_config(model: dict[str, Any], *, sequence_length: int) -> None:
    """Checks the integers of a Hugging Face config that any decoder shares, as far as they are given.

    Raises:
        ConfigError: no `model_type`; heads that do not divide; a sequence longer than the model's positions.
    """
    if not isinstance(model.get("model_type"), str):
        remedy = 'add "model_type": "llama" (or qwen3, mistral, gpt2, ...)'
        raise ConfigError(
            "model.config.model_type", model.get("model_type"), why="it names the architecture", remedy=remedy
        )
    for key, value in model.items():
        whole = key.startswith("num_") or key.endswith("_size")
        if whole and value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"model.config.{key}", value, why="it is not a whole number above 0", remedy="use one")
    hidden, heads = model.get("hidden_size"), model.get("num_attention_heads")
    kv_heads = model.get("num_key_value_heads")
    if hidden and heads and not model.get("head_dim") and hidden % heads:
        near = max(h for h in range(1, heads + 1) if hidden % h == 0)
        why = f"hidden_size {hidden} is not divisible by it"
        raise ConfigError("model.config.num_attention_heads", heads, why=why, remedy=f"use {near}, or set head_dim")
    if heads and kv_heads and heads % kv_heads:
        near = max(h for h in range(1, min(kv_heads, heads) + 1) if heads % h == 0)
        why = f"num_attention_heads {heads} is not divisible by it"
        raise ConfigError("model.config.num_key_value_heads", kv_heads, why=why, remedy=f"use {near}")
    positions = model.get("max_position_embeddings")
    if positions and positions < sequence_length:
        why = f"the model has max_position_embeddings {positions}"
        remedy = f"use at most {positions}, or raise max_position_embeddings"
        raise ConfigError("data.sequence_length", sequence_length, why=why, remedy=remedy)


def _check_engine(config: Config) -> None:
    if config.optimizer.type == "Adam" and not config.optimizer.params.adam_w_mode:
        why = "Adam with L2 in the gradient is not offered"
        raise ConfigError("optimizer.params.adam_w_mode", False, why=why, remedy="use type AdamW")
    for beta in config.optimizer.params.betas:
        if not 0 <= beta < 1:
            why = "a beta must lie in [0, 1)"
            raise ConfigError(
                "optimizer.params.betas", config.optimizer.params.betas, why=why, remedy="use [0.9, 0.95]"
            )
    if config.data_types.grad_accum_dtype == "bf16" and not config.bf16.enabled:
        why = "gradients of an fp32 run are fp32"
        raise ConfigError("data_types.grad_accum_dtype", "bf16", why=why, remedy="remove it, or enable bf16")
