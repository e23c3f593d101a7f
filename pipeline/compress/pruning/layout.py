"""The layout that gathers importance: the section as a training config, the processes as its mesh. No torch.

Importance only needs forward passes: engines run them as they evaluate a model in training, in fp32, with an optimizer
that has no state.
"""

from __future__ import annotations

from math import prod

from foundation.configfile import ConfigTree
from foundation.errors import ConfigError
from foundation.remote_output import local_output
from foundation.section import parse
from pipeline.compress.pruning.axes import GROUPS, Architecture
from pipeline.compress.pruning.config import PruneConfig
from pipeline.config.rules.layout import check_heads
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config
from pipeline.models.folder.model_folder import ModelFolder

_AXES = ("pp", "cp", "tp")


def layout_of(
    config: PruneConfig, source: ModelFolder, architecture: Architecture, *, world_size: int
) -> ResolvedRun | None:
    """The layout of a pruning's processes; None if each has the whole model and they only divide the windows.

    Args:
        config: pruning config, with the data settings of the model's training.
        source: the model.
        architecture: architecture of the model.
        world_size: number of processes.

    Raises:
        ConfigError: the number of processes, the model's sizes or the engine do not allow the layout.
    """
    how = config.importance
    _check_processes(config, world_size)
    shared = any(getattr(how, axis) > 1 for axis in _AXES)
    if not shared and (world_size == 1 or (how.zero_stage == 0 and how.engine == "torch")):
        return None
    _check_architecture(config, architecture)
    try:
        run = resolve(_training_config(config, source, world_size), world_size=world_size)
        heads = (
            {"num_attention_heads": source.config[architecture.keys[GROUPS]]} if architecture.heads_of_hidden else {}
        )
        check_heads({**source.config, **heads}, run.topology, cp_method=how.cp_method)
    except ConfigError as error:
        raise as_importance(error) from None
    return run


def data_ranks(layout: ResolvedRun | None, *, world_size: int) -> int:
    """Number of processes with different windows (data parallelism), or of groups that share a model."""
    return world_size if layout is None else layout.topology.dp


def _check_processes(config: PruneConfig, world_size: int) -> None:
    sizes = {axis: getattr(config.importance, axis) for axis in _AXES}
    together = prod(sizes.values())
    if world_size % together:
        given = {axis: size for axis, size in sizes.items() if size > 1}
        field, value = (f"importance.{next(iter(given))}", next(iter(given.values())))
        product = " x ".join(f"{axis} {size}" for axis, size in given.items())
        why = f"{product} do{'es' if len(given) == 1 else ''} not divide the {world_size} processes that were started"
        raise ConfigError(field, value, why=why, remedy=f"start a multiple of {together}, or use {field} 1")


def _check_architecture(config: PruneConfig, architecture: Architecture) -> None:
    how = config.importance
    if how.tp > 1 and not architecture.tensor_parallel:
        why = "this architecture cannot be pruned with tensor parallelism"
        raise ConfigError("importance.tp", how.tp, why=why, remedy="use importance.zero_stage 3")


def _training_config(config: PruneConfig, source: ModelFolder, world_size: int) -> Config:
    how, data = config.importance, config.data
    groups = world_size // (how.pp * how.cp * how.tp)
    # a schedule needs at least as many micro-batches as stages; evaluations need none
    raw: ConfigTree = {
        "engine": how.engine,
        "model": {"path": str(source.path), "attn_implementation": "sdpa"},
        "data": {"sources": [{"path": data.path}], "sequence_length": data.sequence_length},
        "train_micro_batch_size_per_gpu": data.batch_size,
        "train_batch_size": data.batch_size * groups * how.pp,
        "parallel": {axis: getattr(how, axis) for axis in _AXES} | {"cp_method": how.cp_method},
        "zero_optimization": {"stage": how.zero_stage},
        "optimizer": {"type": "SGD"},
        "run": {"dir": str(local_output(config.output)), "steps": 1},
    }
    raw["data"]["mask_documents"] = data.mask_documents
    return parse(Config, raw)


def as_importance(error: ConfigError) -> ConfigError:
    """Translates an error of a training config to the names of the `importance` section."""
    return ConfigError(_renamed(error.field), error.value, why=_renamed(error.why), remedy=_renamed(error.remedy))


def _renamed(text: str) -> str:
    text = text.replace("zero_optimization.stage", "importance.zero_stage").replace("parallel.", "importance.")
    if text in ("parallel", "engine"):
        return f"importance.{text}".removesuffix(".parallel")
    for engine in ("torch", "deepspeed"):
        text = text.replace(f"engine {engine}", f"importance.engine {engine}")
    return text
