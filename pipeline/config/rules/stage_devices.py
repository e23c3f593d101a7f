"""`parallel.stage_speeds` and `parallel.stage_memory_gb`: pipeline ranks on devices that differ. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foundation.errors import ConfigError
from pipeline.config.sections.compression import DistillSection
from pipeline.config.sections.groups import IslandsSection
from pipeline.config.sections.layout import ParallelSection
from pipeline.config.topology import Topology

SPEEDS, MEMORY = "parallel.stage_speeds", "parallel.stage_memory_gb"
GB = 1e9


@dataclass(frozen=True)
class StageDevices:
    """Devices of the pipeline ranks, by which decoder layers are divided into stages.

    Attributes:
        speeds: speed of every pipeline rank, in any unit.
        memory: bytes that tensors may take on every pipeline rank's device; None without a limit.
    """

    speeds: tuple[float, ...]
    memory: tuple[float, ...] | None = None


def given_devices(parallel: ParallelSection, topology: Topology) -> StageDevices:
    """Returns the config's devices; speeds are equal where they are absent or still to be measured."""
    speeds, memory = parallel.stage_speeds, parallel.stage_memory_gb
    if speeds is None or speeds == "measured":
        speeds = (1.0,) * topology.pp
    return StageDevices(speeds, None if memory is None else tuple(each * GB for each in memory))


def check_stage_devices(
    parallel: ParallelSection, topology: Topology, *, islands: IslandsSection | None, distill: DistillSection | None
) -> None:
    """Refuses speeds and memory of stages without a pipeline, and lists that do not fit the pipeline.

    Raises:
        ConfigError: a key does not fit; the error names the field and what works.
    """
    given = {SPEEDS: parallel.stage_speeds, MEMORY: parallel.stage_memory_gb}
    for field, value in given.items():
        if value is None:
            continue
        if topology.pp == 1:
            why = "there is no pipeline: parallel.pp is 1"
            raise ConfigError(field, value, why=why, remedy="remove it, or set parallel.pp")
        if not isinstance(value, str):
            _check_list(field, value, topology)
    if given[SPEEDS] == "measured":
        _check_measured(islands, distill)


def _check_list(field: str, values: Sequence[float], topology: Topology) -> None:
    if len(values) != topology.pp:
        why = f"it has {len(values)} numbers, and there are {topology.pp} pipeline ranks (parallel.pp)"
        example = [1] * topology.pp if field == SPEEDS else [80] * topology.pp
        raise ConfigError(field, list(values), why=why, remedy=f"give {topology.pp}, e.g. {example}")
    if not all(math.isfinite(each) and each > 0 for each in values):
        why = "every pipeline rank has at least one layer, and a device to compute it"
        raise ConfigError(field, list(values), why=why, remedy="use numbers above 0")


def _check_measured(islands: IslandsSection | None, distill: DistillSection | None) -> None:
    if islands is not None:
        why = "islands exchange weights rank by rank, and each would measure its own division of the layers"
        remedy = "give the same list of speeds on every island, or remove it"
        raise ConfigError(SPEEDS, "measured", why=why, remedy=remedy)
    if distill is not None and (distill.hidden_states is not None or distill.attentions is not None):
        why = "features of layers are matched on the last stage, and which layers it has is known after measuring only"
        raise ConfigError(SPEEDS, "measured", why=why, remedy="give a list of speeds, or remove it")
