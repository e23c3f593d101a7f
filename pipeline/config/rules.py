"""Which layouts are legal, in one table, and `resolve`: the one way from a parsed `Config` to something that can run.

Everything is checked before a process group, a GPU or a byte of output is touched. `model_rules.py` has what must hold
whatever the layout, `layout_rules.py` the arithmetic of a layout that is legal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from headrace.base.errors import ConfigError
from pipeline.config.batch import BatchSizes, resolve_batch
from pipeline.config.data_rules import check_data
from pipeline.config.deepspeed_keys import refuse_on_torch
from pipeline.config.layout_rules import SEVERAL_PIECES, check_layout, check_schedule, micro_batches_of, topology_of
from pipeline.config.model_rules import check_model, check_optimizer, check_precision
from pipeline.config.schedule import Schedule, make_schedule
from pipeline.config.schema import Config
from pipeline.topology import Topology


@dataclass(frozen=True)
class Feature:
    """Something a layout may have that not every engine offers at every ZeRO stage.

    Attributes:
        what: in words.
        field: where the config asks for it.
        without: what to write instead, to do without it.
        given: the value that asks for it; None where it is not asked for.
    """

    what: str
    field: str
    without: str
    given: Callable[[Config, Topology], object]


def _offload(section: str) -> Feature:
    field = f"zero_optimization.{section}.device"

    def given(config: Config, _topology: Topology) -> object:
        device = getattr(config.zero_optimization, section).device
        return None if device == "none" else device

    return Feature(section, field, f"{field} none", given)


def _schedule(name: str) -> Feature:
    def given(config: Config, topology: Topology) -> object:
        return name if topology.pp > 1 and config.parallel.schedule == name else None

    return Feature(f"schedule {name}", "parallel.schedule", "parallel.schedule 1f1b", given)


FEATURES: dict[str, Feature] = {
    "pp": Feature("pipeline stages", "parallel.pp", "parallel.pp 1", lambda _c, t: t.pp if t.pp > 1 else None),
    "tp": Feature("tensor parallelism", "parallel.tp", "parallel.tp 1", lambda _c, t: t.tp if t.tp > 1 else None),
    "cp": Feature("context parallelism", "parallel.cp", "parallel.cp 1", lambda _c, t: t.cp if t.cp > 1 else None),
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
    **{name: _schedule(name) for name in ("gpipe", "interleaved_1f1b", "zero_bubble")},
}
"""Besides data parallelism and the schedule 1f1b: the one every row has, the other every row with pp."""


@dataclass(frozen=True)
class Layout:
    """A row of the table: what one engine runs at one ZeRO stage.

    Attributes:
        engine: deepspeed or torch.
        stage: `zero_optimization.stage`.
        does: what the stage is called there.
        features: those of `FEATURES` that it may have, in any combination.
    """

    engine: str
    stage: int
    does: str
    features: frozenset[str]


_EVERYWHERE = frozenset({"tp", "cp", "ring", "fp16"})
_NATIVE = _EVERYWHERE | {"pp", "gpipe", "interleaved_1f1b", "zero_bubble"}

LAYOUTS = (
    Layout("deepspeed", 0, "ZeRO-0: every data rank holds everything", _EVERYWHERE | {"pp"}),
    Layout("deepspeed", 1, "ZeRO-1: optimizer state is sharded", _EVERYWHERE | {"pp"}),
    Layout("deepspeed", 1, "ZeRO-1: optimizer state is sharded", _EVERYWHERE | {"offload_optimizer"}),
    Layout("deepspeed", 2, "ZeRO-2: gradients too", _EVERYWHERE | {"offload_optimizer"}),
    Layout("deepspeed", 3, "ZeRO-3: parameters too", _EVERYWHERE | {"offload_optimizer", "offload_param"}),
    Layout("torch", 0, "DDP: every data rank holds everything", _NATIVE),
    Layout("torch", 2, "FSDP2, parameters gathered once per step", _NATIVE | {"shard"}),
    # zero_bubble takes gradients of weights apart from those of inputs: torch 2.13 does not find weights that are
    # sharded again after each pass, and loses their gradients without a word
    Layout("torch", 3, "FSDP2, parameters gathered for each pass", (_NATIVE | {"shard"}) - {"zero_bubble"}),
)
"""Every legal layout. Two rows of one engine and stage are alternatives: features of both are not mixed."""


@dataclass(frozen=True)
class ResolvedRun:
    """A config that may run, with everything that follows from it and the number of processes.

    `spare` processes fit into no place of the topology, and wait.
    """

    config: Config
    topology: Topology
    batch: BatchSizes
    steps: int
    schedule: Schedule
    spare: int = 0

    @property
    def plain(self) -> bool:
        """It is the reference: one process, Hugging Face's own forward pass, no layout."""
        return self.config.engine == "torch" and self.topology.world_size == 1

    @property
    def virtual_stages(self) -> int:
        """Pieces of the model that one pipeline rank holds."""
        if self.topology.pp == 1:
            return 1
        return self.config.parallel.virtual_stages or (2 if self.config.parallel.schedule in SEVERAL_PIECES else 1)

    @property
    def layout(self) -> str:
        """The layout in words: engine, sharding, mesh, schedule."""
        config = self.config
        if self.plain:
            return "torch, one plain process"
        stage = config.zero_optimization.stage
        does = next(row.does for row in LAYOUTS if (row.engine, row.stage) == (config.engine, stage))
        given = [(FEATURES[name], value) for name, value in wanted(config, self.topology).items()]
        meshed = ("parallel.pp", "parallel.tp", "parallel.cp")
        others = [f"{f.what} {value}" for f, value in given if f.field not in (*meshed, "parallel.schedule")]
        if self.topology.pp > 1:
            pieces = f", {self.virtual_stages} pieces per rank" if self.virtual_stages > 1 else ""
            others.insert(0, config.parallel.schedule + pieces)
        if self.spare:
            others.append(f"{self.spare} spare process{'es' if self.spare > 1 else ''}")
        return "; ".join([config.engine, does, str(self.topology), *others])

    @property
    def precision(self) -> str:
        """The precision in words."""
        if self.config.fp16.enabled:
            scale = self.config.fp16.loss_scale
            return f"fp16, fp32 master weights, loss scale {f'{scale:g}' if scale else 'dynamic'}"
        return "bf16, fp32 master weights" if self.config.bf16.enabled else "fp32"


def resolve(config: Config, *, world_size: int, begun: bool = False) -> ResolvedRun:
    """Checks the rules and derives layout, batch, steps and schedule.

    Args:
        config: the config.
        world_size: number of processes.
        begun: the run has trained before, and goes on with the processes there are, as with `parallel.elastic`.

    Raises:
        ConfigError: on the first rule that is broken.
    """
    check_data(config.data)
    check_model(config)
    check_optimizer(config)
    check_precision(config)
    elastic = begun or config.parallel.elastic
    topology = topology_of(config, world_size=world_size, elastic=elastic)
    refuse_illegal(config, topology)
    if config.engine == "torch":
        refuse_on_torch(config)
    check_layout(config, topology)
    least, rounds = micro_batches_of(config, topology)
    batch = resolve_batch(config, dp=topology.dp, elastic=elastic, least=least, rounds=rounds)
    check_schedule(config, topology, batch)
    steps = _steps(config, batch)
    _check_stages(config, steps)
    spare = world_size - topology.world_size
    return ResolvedRun(config, topology, batch, steps, make_schedule(config, steps=steps), spare)


def wanted(config: Config, topology: Topology) -> dict[str, object]:
    """The features a config asks for, with the values that ask for them."""
    asked = {name: feature.given(config, topology) for name, feature in FEATURES.items()}
    return {name: value for name, value in asked.items() if value is not None}


def refuse_illegal(config: Config, topology: Topology) -> None:
    """Refuses a layout that is not in the table.

    Raises:
        ConfigError: the nearest legal layouts are its remedy.
    """
    engine, stage = config.engine, config.zero_optimization.stage
    asked = wanted(config, topology)
    here = [row for row in LAYOUTS if (row.engine, row.stage) == (engine, stage)]
    if any(row.features >= asked.keys() for row in here):
        return
    remedy = _nearest(engine, stage, asked)
    if not here:
        stages = ", ".join(str(row.stage) for row in LAYOUTS if row.engine == engine)
        why = f"the {engine} engine runs stages {stages}"
        raise ConfigError("zero_optimization.stage", stage, why=why, remedy=remedy)
    lacks = min((asked.keys() - row.features for row in here), key=len)
    name = next(name for name in asked if name in lacks)
    others = [FEATURES[other].what for other in asked if other != name and other not in _EVERYWHERE]
    beside = f" beside {' and '.join(others)}" if any(name in row.features for row in here) else ""
    why = f"the {engine} engine at ZeRO stage {stage} has no {FEATURES[name].what}{beside}"
    raise ConfigError(FEATURES[name].field, asked[name], why=why, remedy=remedy)


def _nearest(engine: str, stage: int, asked: Collection[str]) -> str:
    """The fewest changes that make a layout legal: every way of making so few, the nearest stage of each."""
    ways: dict[tuple[str, ...], tuple[int, int, int, int, str]] = {}
    for row in LAYOUTS:
        dropped = tuple(FEATURES[name].without for name in asked if name not in row.features)
        other_engine = (f"engine {row.engine}",) if row.engine != engine else ()
        other_stage = (f"zero_optimization.stage {row.stage}",) if row.stage != stage else ()
        changes = (*other_engine, *other_stage, *dropped)
        kind = (*other_engine, *dropped)
        # to keep what was asked for comes before doing without it
        way = (len(changes), len(dropped), abs(row.stage - stage), -row.stage, " and ".join(changes))
        ways[kind] = min(ways.get(kind, way), way)
    fewest = min(ways.values())[0]
    return "use " + ", or ".join(way[-1] for way in sorted(ways.values()) if way[0] == fewest)


def _check_stages(config: Config, steps: int) -> None:
    for number, stage in enumerate(config.data.curriculum or ()):
        if stage.after_step >= steps:
            why = f"the run has {steps:,} steps: the stage would never begin"
            remedy = f"a number below {steps}, run.steps {stage.after_step + 1} or more, or leave the stage out"
            raise ConfigError(f"data.curriculum.{number}.after_step", stage.after_step, why=why, remedy=remedy)


def _steps(config: Config, batch: BatchSizes) -> int:
    run = config.run
    if (run.steps is None) == (run.tokens is None):
        why = "neither is given" if run.steps is None else "both are given"
        raise ConfigError("run.steps / run.tokens", why=why, remedy="give exactly one of the two")
    if run.steps is not None:
        return run.steps
    assert run.tokens is not None
    return math.ceil(run.tokens / batch.tokens)
