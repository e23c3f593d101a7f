"""The table of supported parallel layouts, and `resolve`: from a validated `Config` to a run with all sizes derived.

Everything is checked before a process group, a GPU or a byte of output is touched. `training.py` has the rules that
hold in any layout, `layout.py` the divisibility rules of a supported layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from foundation.errors import ConfigError, found_by, refuse_all
from pipeline.config.accounts import StepAccounts
from pipeline.config.batch import BatchSizes, resolve_batch
from pipeline.config.deepspeed.keys import refuse_on_torch
from pipeline.config.rules.communication import check_gradient_dtype, check_secondary_shards
from pipeline.config.rules.data import check_data
from pipeline.config.rules.expert_exchange import check_overlap
from pipeline.config.rules.fallback_layouts import choose_layout
from pipeline.config.rules.groups import check_islands, check_replicas_section, refuse_remote_groups
from pipeline.config.rules.layout import check_layout, check_schedule, micro_batch_constraints, topology_of
from pipeline.config.rules.multi_token import check_multi_token
from pipeline.config.rules.own_loss import check_own_loss
from pipeline.config.rules.parametrization import check_parametrization
from pipeline.config.rules.precision import (
    check_fp8_precision,
    check_fp8_tokens,
    check_precision,
    check_quantization_aware,
)
from pipeline.config.rules.shares import shared_batch
from pipeline.config.rules.stage_devices import StageDevices, check_stage_devices, given_devices
from pipeline.config.rules.stages import CheckedMesh, StagePlace, resolve_stages
from pipeline.config.rules.training import (
    check_checkpoints,
    check_model,
    check_moe,
    check_optimizer,
    check_origin_and_ema,
)
from pipeline.config.schedule import Schedule, make_schedule
from pipeline.config.sections.data import DataSection
from pipeline.config.sections.layout import SCHEDULES
from pipeline.config.sections.run import Config, ProfileSection, RunSection
from pipeline.config.stages import is_staged
from pipeline.config.topology import Topology


@dataclass(frozen=True)
class Feature:
    """A feature of a layout that not every engine supports at every ZeRO stage.

    Attributes:
        name: the feature, for messages.
        field: the config field that selects it.
        off: `field value` that turns it off, for remedies.
        value: the value that selects it in a config; None where it is off.
    """

    name: str
    field: str
    off: str
    value: Callable[[Config, Topology], object]


def _offload(section: str) -> Feature:
    field = f"zero_optimization.{section}.device"

    def value(config: Config, _topology: Topology) -> object:
        device = getattr(config.zero_optimization, section).device
        return None if device == "none" else device

    return Feature(section, field, f"{field} none", value)


def _schedule(name: str) -> Feature:
    def value(config: Config, topology: Topology) -> object:
        return name if topology.pp > 1 and config.parallel.schedule == name else None

    return Feature(f"schedule {name}", "parallel.schedule", "parallel.schedule 1f1b", value)


FEATURES: dict[str, Feature] = {
    "pp": Feature("pipeline parallelism", "parallel.pp", "parallel.pp 1", lambda _c, t: t.pp if t.pp > 1 else None),
    "tp": Feature("tensor parallelism", "parallel.tp", "parallel.tp 1", lambda _c, t: t.tp if t.tp > 1 else None),
    "cp": Feature("context parallelism", "parallel.cp", "parallel.cp 1", lambda _c, t: t.cp if t.cp > 1 else None),
    "ep": Feature("expert parallelism", "parallel.ep", "parallel.ep 1", lambda _c, t: t.ep if t.ep > 1 else None),
    "ep_overlap": Feature(
        "the exchange of experts beside another micro-batch",
        "parallel.ep_overlap",
        "parallel.ep_overlap false",
        lambda c, t: True if t.ep > 1 and c.parallel.ep_overlap else None,
    ),
    "ring": Feature(
        "ring attention",
        "parallel.cp_method",
        "parallel.cp_method ulysses",
        lambda c, t: "ring" if t.cp > 1 and c.parallel.cp_method == "ring" else None,
    ),
    "shard": Feature(
        "hybrid sharding",
        "parallel.hybrid_shard_size",
        "no parallel.hybrid_shard_size",
        lambda c, _t: c.parallel.hybrid_shard_size,
    ),
    "offload_optimizer": _offload("offload_optimizer"),
    "offload_param": _offload("offload_param"),
    "fp16": Feature("fp16", "fp16.enabled", "bf16.enabled true", lambda c, _t: c.fp16.enabled or None),
    **{name: _schedule(name) for name in SCHEDULES if name != "1f1b"},
}
"""Features of layouts, except data parallelism, which every layout has, and the 1f1b schedule, which every layout with
pp has."""


@dataclass(frozen=True)
class Layout:
    """A row of the table: features that an engine supports together at one ZeRO stage.

    Attributes:
        engine: deepspeed or torch.
        stage: `zero_optimization.stage`.
        sharding: name of the sharding at this stage, for messages.
        features: supported entries of `FEATURES`, in any combination.
    """

    engine: str
    stage: int
    sharding: str
    features: frozenset[str]


_EVERYWHERE = frozenset({"tp", "cp", "ep", "ring", "fp16"})
_NATIVE = _EVERYWHERE | {"pp", *SCHEDULES} - {"1f1b"}

LAYOUTS = (
    Layout("deepspeed", 0, "ZeRO-0: nothing is sharded", _EVERYWHERE | {"pp"}),
    Layout("deepspeed", 1, "ZeRO-1: optimizer states are sharded", _EVERYWHERE | {"pp"}),
    Layout("deepspeed", 1, "ZeRO-1: optimizer states are sharded", _EVERYWHERE | {"offload_optimizer"}),
    Layout("deepspeed", 2, "ZeRO-2: optimizer states and gradients are sharded", _EVERYWHERE | {"offload_optimizer"}),
    Layout(
        "deepspeed",
        3,
        "ZeRO-3: optimizer states, gradients and parameters are sharded",
        _EVERYWHERE | {"offload_optimizer", "offload_param"},
    ),
    # simultaneous passes of two micro-batches need the same weights, which stage 3 frees after each pass
    Layout("torch", 0, "DDP: nothing is sharded", _NATIVE | {"ep_overlap"}),
    Layout(
        "torch",
        1,
        "FSDP2, parameters gathered and gradients reduced once per optimizer step",
        _NATIVE | {"shard", "ep_overlap"},
    ),
    Layout("torch", 2, "FSDP2, parameters gathered once per optimizer step", _NATIVE | {"shard", "ep_overlap"}),
    # if weight and input gradients are computed separately, torch 2.13 does not find weights that are resharded after
    # each pass, and silently loses their gradients
    Layout(
        "torch",
        3,
        "FSDP2, parameters gathered for each forward and backward pass",
        (_NATIVE | {"shard"}) - {name for name, kind in SCHEDULES.items() if kind.splits_backward},
    ),
)
"""Every supported layout. Two rows of one engine and stage are alternatives: their features do not combine."""


@dataclass(frozen=True)
class ResolvedRun:
    """A config that can run, with all values derived from it and from the number of processes.

    Attributes:
        config: the config.
        topology: the mesh.
        batch: global batch, micro-batch and gradient accumulation; in a batch ramp those of its largest step.
        steps: length of the run in optimizer steps.
        schedule: learning-rate schedule.
        spare: number of processes that are not part of the mesh and stand by.
        fallback: line that names the chosen fallback layout and the reason; None in the configured layout.
        layouts: field -> the run in the configured layout and in each fallback, each on its smallest number of
            processes; empty without fallbacks.
        measured_devices: measured devices of the pipeline ranks (`parallel.stage_speeds` "measured"); None before the
            measurement.
        imbalance: rows of the fullest rank of an expert-parallel group divided by the mean, for the formulas of memory
            and time; None where the formulas derive it from `moe.balance`.
        place: the stage's place in a run with stages or a batch ramp; None in other runs. `config` is the stage's then.
        stages: all stages of such a run, this one included, in order; empty in other runs, and within this list.
    """

    config: Config
    topology: Topology
    batch: BatchSizes
    steps: int
    schedule: Schedule
    spare: int = 0
    fallback: str | None = None
    layouts: Mapping[str, ResolvedRun] = field(default_factory=dict)
    measured_devices: StageDevices | None = None
    imbalance: float | None = None
    place: StagePlace | None = None
    stages: tuple[ResolvedRun, ...] = ()

    @cached_property
    def accounts(self) -> StepAccounts:
        """Samples and tokens of every step of the run."""
        if self.place is not None:
            return self.place.accounts
        return StepAccounts.constant(self.batch.samples, self.batch.sequence_length, self.steps)

    @property
    def stage(self) -> int:
        """Number of the stage, from 0."""
        return 0 if self.place is None else self.place.stage.number

    @property
    def first_step(self) -> int:
        """First step of the stage, from 1."""
        return 1 if self.place is None else self.accounts.first_step(self.stage)

    @property
    def last_step(self) -> int:
        """Last step of the stage: that of the run without stages."""
        return self.steps if self.place is None else self.accounts.last_step(self.stage)

    def at(self, step: int) -> ResolvedRun:
        """Returns the stage that has a step; the run itself without stages."""
        return self.stages[self.accounts.stage(step)] if self.stages else self

    @property
    def written_config(self) -> Config:
        """The config of the whole run, with its stages."""
        return self.config if self.place is None else self.place.whole

    def naming(self) -> AbstractContextManager[None]:
        """Returns a context manager that makes errors name the stage; it changes none without stages."""
        return nullcontext() if self.place is None else self.place.stage.naming()

    def same_mesh(self, other: ResolvedRun) -> bool:
        """Tells whether the ranks of two stages form the same process groups."""
        mine, others = ((each.topology, each.shard_size, each.node_size) for each in (self, other))
        return mine == others

    @property
    def ramps(self) -> bool:
        """Whether the batch size changes within the stage."""
        return self.place is not None and self.place.stage.ramp is not None

    def batch_of(self, step: int) -> BatchSizes:
        """Returns the batch sizes of a step of this stage."""
        return self.batch.with_samples(self.accounts.samples_in(step)) if self.ramps else self.batch

    @property
    def plain(self) -> bool:
        """Whether this is the reference: a single process, Hugging Face's own forward pass, no parallelism."""
        return self.config.engine == "reference"

    @property
    def alone(self) -> bool:
        """Whether no process group is needed: one process of an engine of our own."""
        return self.config.engine != "deepspeed" and self.topology.world_size == 1

    @property
    def replicated(self) -> bool:
        """Whether this is one of several replicas of the model that may leave and join."""
        return self.config.replicas is not None and self.config.replicas.name is not None

    @property
    def shard_size(self) -> int | None:
        """Number of data ranks over which engine torch shards parameters; None for all data ranks."""
        unsharded = self.config.engine == "torch" and self.config.zero_optimization.stage == 0
        return 1 if unsharded else self.config.parallel.hybrid_shard_size

    @property
    def node_size(self) -> int | None:
        """Number of data ranks over which engine torch's weights stay sharded during a step (hpZ); None without it."""
        return self.config.zero_optimization.zero_hpz_partition_size if self.config.engine == "torch" else None

    @property
    def expert_shards(self) -> int:
        """Number of ranks over which the experts of an expert-parallel rank are sharded.

        These are all ranks with the same experts, or with hybrid sharding those in one replica; 1 without sharding.
        """
        topology, shard = self.topology, self.shard_size
        if self.config.zero_optimization.stage == 0:
            return 1
        return topology.edp // (1 if shard is None else topology.dp * topology.cp // shard)

    @property
    def overlaps_exchange(self) -> bool:
        """Whether experts exchange a micro-batch's rows during another micro-batch's passes (`parallel.ep_overlap`)."""
        return self.config.parallel.ep_overlap and self.topology.ep > 1 and self.batch.accumulation > 1

    @property
    def zigzag(self) -> bool:
        """Whether context-parallel ranks hold two chunks of a sequence each (`topology.sequence_chunks`)."""
        return self.topology.cp > 1 and self.config.parallel.cp_method == "ring"

    @property
    def virtual_stages(self) -> int:
        """Virtual stages (model chunks) per pipeline rank."""
        if self.topology.pp == 1:
            return 1
        return self.config.parallel.virtual_stages or self.config.parallel.schedule_kind.number_of_stages

    def rank_of_stage(self, stage: int) -> int:
        """Returns the pipeline rank of a (virtual) stage; -1 is the last stage."""
        count = self.topology.pp * self.virtual_stages
        return self.config.parallel.schedule_kind.rank_of(stage % count, self.topology.pp)

    @property
    def stage_devices(self) -> StageDevices:
        """Speeds and memory of the pipeline ranks, measured or from the config."""
        return self.measured_devices or given_devices(self.config.parallel, self.topology)

    @property
    def held_bytes_per_parameter(self) -> float | None:
        """Bytes that engine torch holds per parameter on one device, gradient included; None in other layouts.

        They are the weight and the rest of its fp32 master, the gradient (fp32 where several micro-batches or replicas
        are summed), and the optimizer's states. Source: `engines.torch_native.single`.
        """
        if self.plain or not self.alone:
            return None
        config = self.config
        weight, gradient = (4, 4) if not (config.bf16.enabled or config.fp16.enabled) else (6, 2)
        weight = 4 if config.bf16.enabled else weight
        states = len(config.optimizer.kind.states) * config.optimizer.moments_bytes + 4 * (config.run.ema is not None)
        return weight + (4 if self.batch.accumulation > 1 or self.replicated else gradient) + states

    @property
    def layout(self) -> str:
        """Describes the layout in one line: engine, sharding, mesh, pipeline schedule."""
        return self._mesh + (f"; {self.fallback}" if self.fallback else "")

    @property
    def _mesh(self) -> str:
        config = self.config
        if self.plain:
            return "reference, one plain process"
        if self.alone:
            return "torch, one device: nothing is sharded"
        stage = config.zero_optimization.stage
        sharding = next(row.sharding for row in LAYOUTS if (row.engine, row.stage) == (config.engine, stage))
        features = [(FEATURES[name], value) for name, value in selected_features(config, self.topology).items()]
        shown = ("parallel.pp", "parallel.tp", "parallel.cp", "parallel.ep", "parallel.schedule")
        others = [
            feature.name if value is True else f"{feature.name} {value}"
            for feature, value in features
            if feature.field not in shown
        ]
        if self.topology.pp > 1:
            chunks = f", {self.virtual_stages} virtual stages per rank" if self.virtual_stages > 1 else ""
            others.insert(0, config.parallel.schedule + chunks)
        if self.spare:
            others.append(f"{self.spare} spare process{'es' if self.spare > 1 else ''}")
        return "; ".join([config.engine, sharding, str(self.topology), *others])

    @property
    def precision(self) -> str:
        """Describes mixed precision in one line."""
        if self.config.fp16.enabled:
            scale = self.config.fp16.loss_scale
            return f"fp16, fp32 master weights, loss scale {f'{scale:g}' if scale else 'dynamic'}"
        if self.config.fp8.enabled:
            emulated = ", emulated" if self.config.fp8.emulate else ""
            return f"fp8 {self.config.fp8.recipe}{emulated}, with bf16, fp32 master weights"
        return "bf16, fp32 master weights" if self.config.bf16.enabled else "fp32"


def resolve(config: Config, *, world_size: int, begun: bool = False) -> ResolvedRun:
    """Checks all rules and derives topology, batch sizes, steps and learning-rate schedule.

    Args:
        config: the config.
        world_size: number of processes.
        begun: whether the run is resumed and thus accepts any number of processes, as with `parallel.elastic`.

    Returns:
        The run; its `config` has the fallback's layout if a fallback was chosen.

    Raises:
        ConfigError: a rule is broken; `CombinedConfigError` for several independent rules.
    """
    if is_staged(config):
        found = partial(_check, world_size=world_size)
        runs = resolve_stages(config, check=found, finish=partial(_finish, world_size=world_size), begun=begun)
        return replace(runs[0], stages=tuple(runs))
    layouts: dict[str, ResolvedRun] = {}

    def check(name: str, each: Config, processes: int) -> None:
        layouts[name] = _resolve(each, processes, elastic=True)

    chosen = choose_layout(config, world_size=world_size, check=check)
    run = _resolve(chosen.config, world_size, elastic=begun or chosen.config.parallel.elastic)
    return replace(run, fallback=chosen.text, layouts=layouts)


def _resolve(config: Config, world_size: int, *, elastic: bool) -> ResolvedRun:
    return _finish(
        config, _check(config, world_size=world_size, elastic=elastic), world_size=world_size, elastic=elastic
    )


def _check(config: Config, *, world_size: int, elastic: bool) -> CheckedMesh:
    """Checks the rules that do not depend on the length of the run, and derives the mesh and its batch sizes."""
    mesh: list[tuple[Topology, BatchSizes]] = []
    checks: list[Callable[[], object]] = [
        lambda: check_data(config.data),
        lambda: check_model(config.model, sequence_length=config.data.sequence_length),
        lambda: check_parametrization(config.model, config.optimizer),
        lambda: check_moe(config.moe),
        lambda: check_origin_and_ema(config),
        lambda: check_optimizer(config.optimizer),
        lambda: check_precision(config.bf16, config.fp16, config.data_types),
        lambda: check_fp8_precision(
            config.fp8, bf16=config.bf16, engine=config.engine, stage=config.zero_optimization.stage
        ),
        lambda: refuse_on_torch(config) if config.engine != "deepspeed" else None,
        lambda: check_length(config.run),
        lambda: check_checkpoints(config.run),
        lambda: refuse_remote_groups(config),
        lambda: check_islands(config),
        lambda: check_replicas_section(config),
        lambda: mesh.append(_mesh(config, world_size=world_size, elastic=elastic)),
    ]
    refuse_all(found_by(checks))
    return mesh[0]


def _finish(
    config: Config, mesh: CheckedMesh, *, world_size: int, elastic: bool, place: StagePlace | None = None
) -> ResolvedRun:
    """Checks the other rules, and derives steps and schedule: those of a stage if it has a `place`."""
    topology, batch = mesh
    check_schedule(config.parallel, topology, batch, memory=config.memory)
    check_fp8_tokens(config.fp8, topology, batch)
    check_quantization_aware(config.quantization_aware, topology, fp8=config.fp8)
    check_multi_token(config, topology)
    check_own_loss(config, topology)
    check_gradient_dtype(config, topology, batch)
    check_secondary_shards(config, topology)
    check_overlap(config, topology, batch, elastic=elastic)
    steps = steps_of(config.run, batch) if place is None else place.accounts.steps
    _check_curriculum(config.data, steps)
    _check_profile(config.profile, steps, topology)
    spare = world_size - topology.world_size
    first, last = (1, steps) if place is None else place.scheduled
    lr, length, spans = config.optimizer.params.lr, last + 1 - first, tuple[tuple[int, int, int], ...]()
    if place is not None and config.scheduler is not None and config.scheduler.count == "tokens":
        spans = place.accounts.tokens_within(first, last)
        tokens = place.accounts.tokens(last) - place.accounts.tokens(first - 1)
        length = -(-tokens // max(each for _, _, each in spans))
    schedule = replace(make_schedule(config.scheduler, lr=lr, steps=length, begin=first - 1), spans=spans)
    return ResolvedRun(config, topology, batch, steps, schedule, spare, place=place)


def _mesh(config: Config, *, world_size: int, elastic: bool) -> tuple[Topology, BatchSizes]:
    """Derives the mesh and its batch sizes, by rules that build on each other."""
    topology = topology_of(config, world_size=world_size, elastic=elastic)
    refuse_unsupported(config, topology)
    check_layout(config, topology)
    check_stage_devices(config.parallel, topology, islands=config.islands, distill=config.distill)
    if config.parallel.shares is not None:
        return topology, shared_batch(config, topology)
    least, multiple = micro_batch_constraints(config.parallel, topology)
    model_ranks = topology.world_size // topology.dp
    sizes = {"dp": topology.dp, "min_micro_batches": least, "multiple_of": multiple, "model_ranks": model_ranks}
    return topology, resolve_batch(config, elastic=elastic, **sizes)


def _check_reference(topology: Topology, selected: Mapping[str, object]) -> None:
    """Refuses features that the reference, one plain process, does not have."""
    if topology.world_size > 1:
        why = f"the reference is one process, and {topology.world_size} were started"
        raise ConfigError("engine", "reference", why=why, remedy="use engine torch or deepspeed, or one process")
    others = [FEATURES[name] for name in selected if name != "fp16"]
    if others:
        why = f"the reference has no {others[0].name}"
        raise ConfigError(others[0].field, why=why, remedy=f"use engine torch, or {others[0].off}")


def selected_features(config: Config, topology: Topology) -> dict[str, object]:
    """Returns name -> value of the features that a config selects."""
    values = {name: feature.value(config, topology) for name, feature in FEATURES.items()}
    return {name: value for name, value in values.items() if value is not None}


def refuse_unsupported(config: Config, topology: Topology) -> None:
    """Refuses a layout that is not in the table.

    Raises:
        ConfigError: the layout is unsupported; the remedy names the nearest supported layouts.
    """
    engine, stage = config.engine, config.zero_optimization.stage
    selected = selected_features(config, topology)
    if engine == "reference":
        _check_reference(topology, selected)
        return
    here = [row for row in LAYOUTS if (row.engine, row.stage) == (engine, stage)]
    if any(row.features >= selected.keys() for row in here):
        return
    missing = min((selected.keys() - row.features for row in here), key=len)
    key = next(key for key in selected if key in missing)
    others = [FEATURES[other].name for other in selected if other != key and other not in _EVERYWHERE]
    together = f" together with {' and '.join(others)}" if any(key in row.features for row in here) else ""
    why = f"engine {engine} at ZeRO stage {stage} does not support {FEATURES[key].name}{together}"
    raise ConfigError(FEATURES[key].field, selected[key], why=why, remedy=_nearest(engine, stage, selected))


def _nearest(engine: str, stage: int, selected: Collection[str]) -> str:
    """Names the smallest sets of changes that give a supported layout, each with the nearest ZeRO stage."""
    ways: dict[tuple[str, ...], tuple[int, int, int, int, str]] = {}
    for row in LAYOUTS:
        dropped = tuple(FEATURES[name].off for name in selected if name not in row.features)
        other_engine = (f"engine {row.engine}",) if row.engine != engine else ()
        other_stage = (f"zero_optimization.stage {row.stage}",) if row.stage != stage else ()
        changes = (*other_engine, *other_stage, *dropped)
        kind = (*other_engine, *dropped)
        # ways that keep every selected feature come first
        way = (len(changes), len(dropped), abs(row.stage - stage), -row.stage, " and ".join(changes))
        ways[kind] = min(ways.get(kind, way), way)
    fewest = min(ways.values())[0]
    return "use " + ", or ".join(way[-1] for way in sorted(ways.values()) if way[0] == fewest)


def _check_curriculum(data: DataSection, steps: int) -> None:
    for number, stage in enumerate(data.curriculum or ()):
        if stage.after_step >= steps:
            why = f"the run has {steps:,} steps, so that the stage would never begin"
            remedy = f"use a number below {steps}, run.steps {stage.after_step + 1} or more, or leave the stage out"
            raise ConfigError(f"data.curriculum.{number}.after_step", stage.after_step, why=why, remedy=remedy)


def _check_profile(profile: ProfileSection | None, steps: int, topology: Topology) -> None:
    if profile is None:
        return
    first, last = profile.steps
    if first > last:
        why = "the first step is after the last"
        raise ConfigError("profile.steps", [first, last], why=why, remedy=f"use [{last}, {first}]")
    if last > steps:
        remedy = f"use steps up to {steps}, or run.steps {last} or more"
        raise ConfigError("profile.steps", [first, last], why=f"the run has {steps:,} steps", remedy=remedy)
    if max(profile.ranks) >= topology.world_size:
        why = (
            f"the run has the ranks 0 to {topology.world_size - 1}" if topology.world_size > 1 else "the only rank is 0"
        )
        remedy = f"use ranks below {topology.world_size}"
        raise ConfigError("profile.ranks", list(profile.ranks), why=why, remedy=remedy)


def check_length(run: RunSection) -> None:
    """Refuses a run whose length is given twice or not at all.

    Raises:
        ConfigError: `run.steps` and `run.tokens` are both given, or neither.
    """
    if (run.steps is None) == (run.tokens is None):
        why = "neither is given" if run.steps is None else "both are given"
        raise ConfigError("run.steps / run.tokens", why=why, remedy="give exactly one of the two")


def steps_of(run: RunSection, batch: BatchSizes) -> int:
    """Returns a run's number of optimizer steps, from `run.steps` or `run.tokens`."""
    if run.steps is not None:
        return run.steps
    assert run.tokens is not None
    return math.ceil(run.tokens / batch.tokens)
