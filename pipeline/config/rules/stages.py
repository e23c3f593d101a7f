"""Rules of a run in stages, and the derivation of its stages: each is resolved like a run of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from foundation.errors import ConfigError, found_by, refuse_all
from pipeline.config.accounts import StageBatches, StepAccounts, make_accounts, ramp_sizes
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.run import Config
from pipeline.config.stages import StageConfig, stage_configs
from pipeline.config.topology import Topology

if TYPE_CHECKING:
    from pipeline.config.rules.resolve import ResolvedRun

CheckedMesh = tuple[Topology, BatchSizes]


@dataclass(frozen=True)
class StagePlace:
    """Place of a stage in its run.

    Attributes:
        stage: the stage, with its config.
        accounts: samples and tokens of every step of the run.
        scheduled: (first, last) step of the stages that share this stage's learning-rate schedule.
        whole: the config of the run, with its stages.
    """

    stage: StageConfig
    accounts: StepAccounts
    scheduled: tuple[int, int]
    whole: Config


class _FinishStage(Protocol):
    def __call__(
        self, config: Config, mesh: CheckedMesh, *, elastic: bool, place: StagePlace | None
    ) -> ResolvedRun: ...


class _CheckStage(Protocol):
    def __call__(self, config: Config, *, elastic: bool) -> CheckedMesh: ...


def resolve_stages(config: Config, *, check: _CheckStage, finish: _FinishStage, begun: bool) -> list[ResolvedRun]:
    """Resolves all stages of a run.

    Args:
        config: a config with stages, or with a batch ramp.
        check: checks one stage's config, and derives its mesh and batch sizes.
        finish: makes the resolved run of one stage.
        begun: whether the run is resumed and thus accepts any number of processes.

    Raises:
        ConfigError: a stage is invalid; the error names its key.
    """
    stages = stage_configs(config)
    refuse_all(
        found_by(
            [lambda: _refuse_features(config, stages), lambda: _check_names(stages), lambda: _check_continued(stages)]
        )
    )
    meshes: list[CheckedMesh] = []
    for stage in stages:
        with stage.naming():
            _check_changes(stage)
            meshes.append(check(stage.config, elastic=begun or stage.config.parallel.elastic))
            _check_ramp(stage, meshes[-1], elastic=begun or stage.config.parallel.elastic)
            _check_processes(stage, meshes)
    accounts = make_accounts(
        [_batches(stage, batch) for stage, (_, batch) in zip(stages, meshes, strict=True)],
        steps=config.run.steps,
        tokens=config.run.tokens,
    )
    runs = []
    for stage, mesh in zip(stages, meshes, strict=True):
        place = StagePlace(stage, accounts, _scheduled(stages, accounts, stage.number), config)
        with stage.naming():
            elastic = begun or stage.config.parallel.elastic
            runs.append(finish(stage.config, mesh, elastic=elastic, place=place))
    return runs


def _batches(stage: StageConfig, batch: BatchSizes) -> StageBatches:
    until = None if stage.section is None or stage.section.until == "rest" else stage.section.until
    ended = stage.section is not None and stage.section.implicit
    key = f"stages.{stage.number}.train_batch_size" if "train_batch_size" in stage.changes else "train_batch_size"
    return StageBatches(stage.name, batch.samples, batch.sequence_length, until, stage.ramp, ended, key)


def _scheduled(stages: Sequence[StageConfig], accounts: StepAccounts, number: int) -> tuple[int, int]:
    """Returns the steps from the stage that names this stage's scheduler to the next that names another."""
    naming = [0, *(stage.number for stage in stages[1:] if "scheduler" in stage.changes)]
    first = max(each for each in naming if each <= number)
    after = next((each for each in naming if each > number), len(stages))
    return accounts.first_step(first), accounts.last_step(after - 1)


def _refuse_features(config: Config, stages: Sequence[StageConfig]) -> None:
    """Refuses features that count steps of equal batches, or whose processes cannot start a stage together."""
    which = "stages" if config.stages is not None else "a batch ramp"
    found: dict[str, Any] = {
        "islands": config.islands,
        "replicas": config.replicas,
        "distill": config.distill,
        "launch.fallback_layouts": config.launch.fallback_layouts or None,
        "parallel.stage_speeds": "measured" if config.parallel.stage_speeds == "measured" else None,
    }
    for field, value in found.items():
        if value is not None:
            raise ConfigError(field, why=f"it does not work with {which}", remedy=f"remove it, or {which}")
    for stage in stages:
        if stage.config.data.curriculum is not None:
            why, remedy = f"it counts steps of equal batches, and the config has {which}", "give each stage its weights"
            raise ConfigError("data.curriculum", why=why, remedy=f"{remedy}: data.sources of an entry of stages")


def _check_names(stages: Sequence[StageConfig]) -> None:
    names = [stage.name for stage in stages]
    for number, name in enumerate(names):
        if name in names[:number]:
            why = "another stage has the same name"
            raise ConfigError(f"stages.{number}.name", name, why=why, remedy="give each stage a name of its own")


def _check_changes(stage: StageConfig) -> None:
    """Refuses changes of keys that decide what the model and its optimizer states are."""
    for section, allowed in _ALLOWED.items():
        for key, value in (stage.changes.get(section) or {}).items():
            if stage.number and key not in allowed:
                why = "a stage keeps the model, its shapes and the kind of its optimizer"
                remedy = f"change {' or '.join(f'{section}.{each}' for each in allowed)} only"
                raise ConfigError(f"{section}.{key}", value, why=why, remedy=remedy)


_ALLOWED = {"model": ("config", "attn_implementation"), "optimizer": ("params",)}


def _check_continued(stages: Sequence[StageConfig]) -> None:
    """Refuses to go on with sources whose windows are others than in the stage before."""
    for before, stage in pairwise(stages):
        if stage.section is None or not stage.section.continue_sources:
            continue
        was, now, field = before.config.data, stage.config.data, f"stages.{stage.number}.continue_sources"
        for key in ("sequence_length", "packing"):
            if getattr(was, key) != getattr(now, key):
                why = f"data.{key} is {getattr(was, key)!r} in stage '{before.name}' and {getattr(now, key)!r} in this"
                remedy = f"leave it out: the sources are shuffled anew; or keep data.{key}"
                raise ConfigError(field, True, why=f"{why}: windows of the text are not the same", remedy=remedy)
        named = [{(each.path, each.source) for each in data.sources} for data in (was, now)]
        if not named[0] & named[1]:
            why = f"stage '{before.name}' has none of its sources"
            raise ConfigError(field, True, why=why, remedy="leave it out")


def _check_processes(stage: StageConfig, meshes: Sequence[CheckedMesh]) -> None:
    """Refuses a layout for another number of processes: those that end a stage begin the next."""
    (first, _), (own, _) = meshes[0], meshes[-1]
    if own.world_size != first.world_size:
        why = f"its layout takes {own.world_size} processes, and that of the first stage {first.world_size}"
        raise ConfigError("parallel", stage.changes.get("parallel"), why=why, remedy="use layouts of equal size")


def _check_ramp(stage: StageConfig, mesh: CheckedMesh, *, elastic: bool) -> None:
    ramp, (topology, batch) = stage.ramp, mesh
    if ramp is None:
        return
    for field, value in _incompatible(stage.config, topology):
        remedy = "use stages with fixed batch sizes"
        raise ConfigError("train_batch_size", why=f"a batch ramp does not work with {field} {value}", remedy=remedy)
    if ramp.start >= ramp.to:
        why = f"the batch would not grow: the ramp leads to {ramp.to}"
        raise ConfigError("train_batch_size.from", ramp.start, why=why, remedy=f"use less than {ramp.to}")
    if ramp_sizes(ramp)[-1] != ramp.to:
        why = f"from {ramp.start} to {ramp.to} are {ramp.to - ramp.start} samples, no whole number of increments"
        near = next(each for each in range(ramp.by or 1, 0, -1) if (ramp.to - ramp.start) % each == 0)
        raise ConfigError("train_batch_size.by", ramp.by, why=why, remedy=f"use {near}, or leave it out")
    unit = topology.dp * batch.micro
    for key, size in (("from", ramp.start), ("by", ramp.by)):
        if size is not None and size % unit and not elastic:
            nearest = f"{size // unit * unit} or {-(-size // unit) * unit}" if size > unit else str(unit)
            why = f"it is no multiple of micro-batch {batch.micro} x dp {topology.dp} = {unit}"
            raise ConfigError(f"train_batch_size.{key}", size, why=why, remedy=f"use {nearest}")


def _incompatible(config: Config, topology: Topology) -> Iterator[tuple[str, object]]:
    if topology.pp > 1:
        yield "parallel.pp", topology.pp
    if config.parallel.shares is not None:
        yield "parallel.shares", config.parallel.shares
    if config.gradient_accumulation_steps is not None:
        yield "gradient_accumulation_steps", config.gradient_accumulation_steps
