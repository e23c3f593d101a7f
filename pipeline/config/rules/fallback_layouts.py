"""`launch.fallback_layouts`: the layout of a start on fewer processes than the configured one needs.

By law 4 (re-layout) any fallback layout is valid: every layout can read a checkpoint, and the batches and the loss
curve stay the same. Every start tries the configured layout first, so a run grows back without help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from foundation.configfile import ConfigTree
from foundation.errors import ConfigError, problems_in, refuse_all
from pipeline.config.rules.layout import fewest_processes, topology_of
from pipeline.config.sections.deepspeed import ExpertParallelSection
from pipeline.config.sections.layout import FallbackLayout, ParallelSection
from pipeline.config.sections.run import Config

_OTHERS = {"engine", "zero_stage", "train_micro_batch_size_per_gpu"}


@dataclass(frozen=True)
class ChosenLayout:
    """The layout of a start.

    Attributes:
        config: the config with this layout in place of its own.
        text: line that names the fallback and why it was chosen; None for the configured layout.
    """

    config: Config
    text: str | None = None


def apply_fallback(config: Config, layout: FallbackLayout) -> Config:
    """Returns a config with another layout; DeepSpeed's keys for an axis are removed."""
    parallel = ParallelSection(**layout.model_dump(exclude=_OTHERS), elastic=True, shares=config.parallel.shares)
    update: ConfigTree = {
        "parallel": parallel,
        "pipeline": config.pipeline.model_copy(update={"stages": None}),
        "tensor_parallel": config.tensor_parallel.model_copy(update={"autotp_size": None}),
        "expert_parallel": ExpertParallelSection(),
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
    """Chooses the configured layout, or else the first fallback that fits the number of processes.

    Args:
        config: the config.
        world_size: number of processes.
        check: refuses a config that cannot run on a number of processes. It gets every layout's field, the config with
            the layout and the layout's smallest number of processes: invalid fallbacks are found before they are
            needed.

    Raises:
        ConfigError: a layout is invalid at any number of processes, or no layout fits.
    """
    layouts = fallback_fields(config)
    if not layouts:
        return ChosenLayout(config)
    own = config.model_copy(update={"parallel": config.parallel.model_copy(update={"elastic": True})})
    candidates = {"parallel": own} | {field: apply_fallback(config, layout) for field, layout in layouts.items()}
    needed: list[int] = []
    for field, candidate in candidates.items():
        with naming_fallback(field, config):
            needed.append(fewest_processes(candidate))
            check(field, candidate, needed[-1])
    for number, candidate in enumerate(candidates.values()):
        if _fits(candidate, world_size):
            return ChosenLayout(candidate, _text(number, needed[0], world_size, count=len(layouts)) if number else None)
    why = f"{world_size} processes are there; the configured layout takes {needed[0]}, the fallbacks " + ", ".join(
        map(str, needed[1:])
    )
    remedy = f"start {min(needed)} or more processes, or add a smaller layout to launch.fallback_layouts, such as {{}}"
    raise ConfigError("parallel", why=why, remedy=remedy)


def fallback_fields(config: Config) -> dict[str, FallbackLayout]:
    """Returns dotted path -> fallback layout, in order."""
    return {f"launch.fallback_layouts.{number}": each for number, each in enumerate(config.launch.fallback_layouts)}


@contextmanager
def naming_fallback(field: str, config: Config) -> Iterator[None]:
    """Makes errors of the block name the fallback layout rather than the keys that it replaces.

    Args:
        field: config field of the checked layout; if it is not a fallback, errors stay unchanged.
        config: the config, with the list of fallbacks.

    Raises:
        ConfigError: an error of the block, worded for the fallback.
    """
    layout = fallback_fields(config).get(field)
    if layout is None:
        yield
        return
    problems: tuple[ConfigError, ...] = ()
    try:
        yield
    except ConfigError as error:
        problems = problems_in(error)
    given = layout.model_dump(mode="json", exclude_unset=True)
    refuse_all([_in_fallback(field, given, each) for each in problems])


def _in_fallback(field: str, given: ConfigTree, error: ConfigError) -> ConfigError:
    cannot = error.field if error.value is None else f"{error.field} cannot be {error.value}"
    why, remedy = f"in this layout {cannot}: {error.why}", f"{error.remedy}; or remove it from the list"
    return ConfigError(field, given, why=why, remedy=remedy)


def _fits(config: Config, world_size: int) -> bool:
    try:
        topology_of(config, world_size=world_size, elastic=True)
    except ConfigError:
        return False
    return True


def _text(number: int, needed: int, world_size: int, *, count: int) -> str:
    are = "1 process is" if world_size == 1 else f"{world_size} processes are"
    return f"fallback layout {number} of {count}, since {are} there and the configured layout takes {needed}"
