"""`launch.fallback_layouts`: the layout of a start on fewer processes than the configured one needs.

Law 4 (re-layout) makes any of them right: a checkpoint is read in every layout, and the batches and the curve stay the
same. The configured layout is tried first at every start, so that a run grows back by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import ConfigError
from pipeline.config.layout_rules import fewest_processes, topology_of
from pipeline.config.layout_schema import FallbackLayout, ParallelSection
from pipeline.config.schema import Config

_OTHERS = {"engine", "zero_stage", "train_micro_batch_size_per_gpu"}


@dataclass(frozen=True)
class ChosenLayout:
    """The layout of a start.

    Attributes:
        config: the config with this layout in the place of its own.
        text: which of the fallbacks it is, and why; None for the configured layout.
    """

    config: Config
    text: str | None = None


def apply_fallback(config: Config, layout: FallbackLayout) -> Config:
    """A config with another layout; keys of DeepSpeed for an axis are removed."""
    parallel = ParallelSection(**layout.model_dump(exclude=_OTHERS), elastic=True)
    update: dict[str, Any] = {
        "parallel": parallel,
        "pipeline": config.pipeline.model_copy(update={"stages": None}),
        "tensor_parallel": config.tensor_parallel.model_copy(update={"autotp_size": None}),
        "sequence_parallel_size": None,
    }
    if layout.engine is not None:
        update["engine"] = layout.engine
    if layout.zero_stage is not None:
        update["zero_optimization"] = config.zero_optimization.model_copy(update={"stage": layout.zero_stage})
    if layout.train_micro_batch_size_per_gpu is not None:
        update["train_micro_batch_size_per_gpu"] = layout.train_micro_batch_size_per_gpu
    return config.model_copy(update=update)


def choose_layout(config: Config, *, world_size: int, check: Callable[[str, Config, int], object]) -> ChosenLayout:
    """The configured layout, or else the first fallback that fits the number of processes.

    Args:
        config: the config.
        world_size: number of processes.
        check: refuses a config that cannot run on a number of processes. It is given the field of every layout, the
            config in it and the fewest processes that it takes, so that a fallback is found wrong before it is needed.

    Raises:
        ConfigError: a layout is wrong at any number of processes, or none fits.
    """
    layouts = config.launch.fallback_layouts
    if not layouts:
        return ChosenLayout(config)
    own = config.model_copy(update={"parallel": config.parallel.model_copy(update={"elastic": True})})
    needed = [fewest_processes(own)]
    check("parallel", own, needed[0])
    fallbacks = [apply_fallback(config, layout) for layout in layouts]
    for number, (layout, fallback) in enumerate(zip(layouts, fallbacks, strict=True)):
        needed.append(_check_fallback(number, layout, fallback, check))
    for number, candidate in enumerate([own, *fallbacks]):
        if _fits(candidate, world_size):
            return ChosenLayout(candidate, _text(number, needed[0], world_size, count=len(layouts)) if number else None)
    why = f"{world_size} processes are there; the configured layout takes {needed[0]}, the fallbacks " + ", ".join(
        map(str, needed[1:])
    )
    remedy = f"start {min(needed)} or more processes, or add a smaller layout to launch.fallback_layouts, such as {{}}"
    raise ConfigError("parallel", why=why, remedy=remedy)


def _check_fallback(
    number: int, layout: FallbackLayout, fallback: Config, check: Callable[[str, Config, int], object]
) -> int:
    field = f"launch.fallback_layouts.{number}"
    try:
        fewest = fewest_processes(fallback)
        check(field, fallback, fewest)
    except ConfigError as error:
        given = layout.model_dump(mode="json", exclude_unset=True)
        why = f"in this layout {error.field} cannot be {error.value}: {error.why}"
        raise ConfigError(field, given, why=why, remedy=f"{error.remedy}; or remove it from the list") from None
    return fewest


def _fits(config: Config, world_size: int) -> bool:
    try:
        topology_of(config, world_size=world_size, elastic=True)
    except ConfigError:
        return False
    return True


def _text(number: int, needed: int, world_size: int, *, count: int) -> str:
    are = "1 process is" if world_size == 1 else f"{world_size} processes are"
    return f"fallback layout {number} of {count}, since {are} there and the configured layout takes {needed}"
