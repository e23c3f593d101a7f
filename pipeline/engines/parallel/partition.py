"""Divides a model's decoder layers into the pipeline stages of a run: by cost, and by the devices' speed and memory.

The schedule determines the pipeline rank of a stage. A stage's time is estimated as its cost divided by the speed of
its rank, `parallel.stage_speeds`; the time of the slowest stage is minimized. With memory limits
(`parallel.stage_memory_gb`) no rank gets more layers than fit by the formulas of `sizes.memory`. A rank's layers are
divided evenly among its virtual stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from foundation.errors import ConfigError
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.rules.stage_devices import GB, MEMORY
from pipeline.config.shares import even_parts
from pipeline.engines.common import matrices_of
from pipeline.engines.parallel.costs import describe_stages, forward_flops
from pipeline.engines.parallel.rank_model import Footprint, counts_of, first_prefixes, layer_of, rank_model, widths_of
from pipeline.engines.parallel.stage_plan import stage_plan
from pipeline.engines.parallel.stages import StageLayers, layer_list, split_layers
from pipeline.engines.sizes.memory import peak_memory


def pipeline_stages(run: ResolvedRun, model: nn.Module) -> list[StageLayers]:
    """Returns all (virtual) pipeline stages of a model; a single one without pipeline parallelism.

    Raises:
        ConfigError: no division fits the memory of the devices; see also `split_layers` and `layer_list`.
    """
    count = run.topology.pp * run.virtual_stages
    if count == 1:
        return [StageLayers(0, 1, (0, model.config.num_hidden_layers), 0.0)]  # type: ignore[union-attr, arg-type]
    layers = len(layer_list(model)[1])
    # each rank needs a layer, and both ends are on one rank of a V; messages with more than hidden states need layers
    several = run.virtual_stages > 1 and not run.config.parallel.schedule_kind.v_shaped
    bare_ends = several and not stage_plan(model).carried
    if layers < count - 2 * bare_ends:
        virtual = run.virtual_stages
        why = f"{run.topology.pp} ranks x {virtual} stages each are {count}, and the model has {layers} decoder layers"
        remedy = f"use parallel.pp {max(1, layers // virtual)}" + (", or fewer virtual_stages" if virtual > 1 else "")
        raise ConfigError("parallel.pp", run.topology.pp, why=why, remedy=remedy)
    costs, head = forward_flops(model, sequence_length=run.batch.sequence_length)
    devices = run.stage_devices
    speeds = [devices.speeds[run.rank_of_stage(stage)] for stage in range(count)]
    if devices.memory is None:
        return split_layers(costs, head=head, stages=count, speeds=speeds, bare_ends=bare_ends)
    fit = _Fit(run, model, devices.memory)
    split = partial(split_layers, costs, head=head, stages=count, speeds=speeds, bare_ends=bare_ends)
    stages = split(limit=fit.limit)
    if not stages or fit.short(stages):
        raise fit.error(stages or split())
    return stages


def stage_lines(run: ResolvedRun, model: nn.Module) -> list[str]:
    """Describes each pipeline stage in a line by `costs.describe_stages`; no lines without pipeline parallelism."""
    return describe_stages(model, pipeline_stages(run, model)) if run.topology.pp > 1 else []


class _Fit:
    """Limits on the layers of pipeline ranks, from their devices' memory by the formulas.

    Args:
        run: the resolved config, with a pipeline.
        model: the full model, on meta.
        memory: device memory of each pipeline rank, in bytes.

    Raises:
        ConfigError: the architecture has no formulas.
    """

    def __init__(self, run: ResolvedRun, model: nn.Module, memory: Sequence[float]) -> None:
        widths = widths_of(model.config)
        if widths is None:
            kind = getattr(model.config, "model_type", "this architecture")
            why = f"memory by formulas is not known for {kind}, whose layers are not built like Llama's"
            raise ConfigError(MEMORY, [each / GB for each in memory], why=why, remedy="remove it")
        self._run, self._model, self._memory, self._widths = run, model, memory, widths
        self._pp, self._virtual = run.topology.pp, run.virtual_stages
        forms, topology = matrices_of(model, run.config.optimizer), run.topology
        table = run.config.parallel.tp_plan
        self._counts = counts_of(model, tp=topology.tp, ep=topology.ep, matrices=forms, table=table)
        self._before = first_prefixes(model)
        self._layers = len(layer_list(model)[1])
        self._sizes = [0] * self._layers
        for name, count, *_ in self._counts:
            if (layer := layer_of(name)) is not None:
                self._sizes[layer] += count
        self._peaks: dict[tuple[object, ...], float] = {}
        self._most = [self._capacity(rank) for rank in range(self._pp)] if self._virtual > 1 else []

    def limit(self, stage: int, start: int) -> int:
        """Returns the largest end of a stage that begins with layer `start`; `start` if not even this layer fits."""
        rank, number = self._run.rank_of_stage(stage), stage // self._pp
        if self._virtual > 1:
            return start + even_parts(self._most[rank], self._virtual)[number]
        return _largest(start, self._layers, lambda end: self._holds(rank, [(start, end)]))

    def short(self, stages: Sequence[StageLayers]) -> dict[int, float]:
        """Returns the missing bytes of each pipeline rank that lacks memory."""
        by_rank = (self._peak(rank, self._ranges(stages, rank)) for rank in range(self._pp))
        lacking = (peak - memory for peak, memory in zip(by_rank, self._memory, strict=True))
        return {rank: each for rank, each in enumerate(lacking) if each > 0}

    def error(self, stages: Sequence[StageLayers]) -> ConfigError:
        """Makes the error if no division fits: layers that fit each rank; bytes missing in a division by speed."""
        short = self.short(stages)
        most = [self._capacity(rank) for rank in range(self._pp)]
        lacks = ", ".join(
            f"rank {rank} with {_shown(self._ranges(stages, rank))} lacks {each / GB:,.3g} GB"
            for rank, each in short.items()
        )
        held = ", ".join(map(str, most)) + f" ({sum(most)} in all)"
        why = f"the pipeline ranks hold at most {held} of {self._layers} decoder layers"
        why += f"; divided by speed alone, {lacks}" if lacks else ", and no division of them fits"
        remedy = "use memory.activation_checkpointing full, a smaller micro-batch, or a larger parallel.pp"
        return ConfigError(MEMORY, [round(each / GB, 3) for each in self._memory], why=why, remedy=remedy)

    def _capacity(self, rank: int) -> int:
        """Returns the most layers that fit a rank, divided evenly over its virtual stages."""

        def holds(count: int) -> bool:
            parts = even_parts(count, self._virtual)
            ends = [sum(parts[: number + 1]) for number in range(self._virtual)]
            return self._holds(rank, [(end - part, end) for part, end in zip(parts, ends, strict=True)])

        return _largest(0, self._layers, holds)

    def _holds(self, rank: int, ranges: Sequence[tuple[int, int]]) -> bool:
        return self._peak(rank, ranges) <= self._memory[rank]

    def _peak(self, rank: int, ranges: Sequence[tuple[int, int]]) -> float:
        """Returns a rank's peak bytes with some layers; in most models only the number of layers matters."""
        key = (rank, *(tuple(self._sizes[slice(*each)]) for each in ranges))
        if key not in self._peaks:
            count = self._pp * self._virtual
            own_stages = [stage for stage in range(count) if self._run.rank_of_stage(stage) == rank]
            stages = [StageLayers(stage, count, each, 0.0) for stage, each in zip(own_stages, ranges, strict=False)]
            own = rank_model(self._model, self._counts, stages, before=self._before, tp=self._run.topology.tp)
            footprint = Footprint(self._widths, (own,) * self._pp)
            self._peaks[key] = peak_memory(self._run, footprint, pp_rank=rank).total
        return self._peaks[key]

    def _ranges(self, stages: Sequence[StageLayers], rank: int) -> list[tuple[int, int]]:
        return [stage.layers for stage in stages if self._run.rank_of_stage(stage.index) == rank]


def _shown(ranges: Sequence[tuple[int, int]]) -> str:
    return "layers " + " and ".join(f"{first}-{end - 1}" for first, end in ranges)


def _largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Returns the largest number up to `high` for which the monotone condition holds, and at least `low`."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
