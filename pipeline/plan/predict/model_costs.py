"""Sizes and FLOPs of a model, counted once for all layouts that a plan compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from foundation.errors import ConfigError
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.run import Fp8Section
from pipeline.engines.parallel.costs import expert_flops, forward_flops
from pipeline.engines.parallel.fp8 import experts_in_fp8
from pipeline.engines.parallel.partition import pipeline_stages
from pipeline.engines.parallel.rank_model import Footprint, Widths, widths_of
from pipeline.engines.sizes.footprint import footprint_of
from pipeline.models.count import ModelSize, measure
from pipeline.models.routers import find_routers


@dataclass(frozen=True)
class StageFlops:
    """Forward FLOPs per token of one (virtual) stage, before tensor parallelism.

    Attributes:
        layers: number of decoder layers in the stage.
        linear: FLOPs of matrix products in its layers.
        attention: FLOPs of attention's scores and values, only the causal half, which kernels compute.
        experts: part of `linear` that a token's routed experts take.
        head: FLOPs of the head; 0 on stages without it.
    """

    layers: int
    linear: float
    attention: float
    experts: float
    head: float


@dataclass(frozen=True)
class CostShares:
    """Sizes and FLOPs of the ranks of a pipeline.

    Attributes:
        footprint: parts of the model that the ranks hold.
        flops: FLOPs of the (virtual) stages of every rank, in order.
    """

    footprint: Footprint
    flops: tuple[tuple[StageFlops, ...], ...]


@dataclass
class ModelCosts:
    """A model on meta, and its counts.

    Attributes:
        model: the model, on meta.
        size: parameters and FLOPs per token.
        routed: number of elements that a mixture of experts sums over all ranks (see `TrafficLayout`).
        experts_fit_fp8: whether the experts can use grouped products in fp8, on a GPU that has them.
    """

    model: nn.Module
    size: ModelSize
    routed: int
    experts_fit_fp8: bool
    _layers: tuple[list[float], list[float], list[float], float]
    _shares: dict[tuple[float, ...], CostShares | ConfigError] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, *, sequence_length: int) -> ModelCosts:
        """Counts a model.

        Raises:
            ConfigError: the architecture is not built like Llama's: the formulas do not hold.
        """
        config: Any = model.config
        assert isinstance(config, PretrainedConfig)
        if widths_of(config) is None or not getattr(config, "base_model_pp_plan", None):
            why = "the formulas hold for decoders built like Llama's, with their layers listed by transformers"
            remedy = "headrace check --exact, which executes a step on fake tensors"
            raise ConfigError("model", config.model_type, why=why, remedy=remedy)
        linear, head = forward_flops(model, sequence_length=0)
        # a token attends to half of the positions on average
        causal, _ = forward_flops(model, sequence_length=sequence_length // 2)
        attention = [whole - part for whole, part in zip(causal, linear, strict=True)]
        size = measure(model, config, sequence_length=sequence_length)
        routed = sum(2 * router.experts for router in find_routers(model))
        fit = experts_in_fp8(Fp8Section(enabled=True), model)
        return cls(model, size, routed, fit, (linear, attention, expert_flops(model), head))

    @property
    def widths(self) -> Widths:
        """Sizes of its decoder layers."""
        found = widths_of(self.model.config)
        assert found is not None  # `of` has refused unknown architectures
        return found

    def shares(self, run: ResolvedRun) -> CostShares:
        """Counts the sizes and FLOPs of each rank of a run's pipeline.

        Raises:
            ConfigError: the architecture does not support the layout.
        """
        if run.stage_devices.memory is not None:  # the whole config decides whether a stage fits
            return self._counted(run)
        topology, placed = run.topology, run.config.parallel.schedule_kind.v_shaped
        key = (topology.tp, topology.ep, topology.pp, run.virtual_stages, placed, *run.stage_devices.speeds)
        if key not in self._shares:
            try:
                self._shares[key] = self._counted(run)
            except ConfigError as error:
                self._shares[key] = error
        found = self._shares[key]
        if isinstance(found, ConfigError):
            raise found
        return found

    def _counted(self, run: ResolvedRun) -> CostShares:
        footprint = footprint_of(run, self.model)
        assert footprint is not None  # `of` has refused unknown architectures
        linear, attention, experts, head = self._layers
        ranks: list[list[StageFlops]] = [[] for _ in footprint.ranks]
        stages = pipeline_stages(run, self.model)
        for stage in stages:
            part = slice(*stage.layers)
            last = stage.index == len(stages) - 1
            inside, scores, sparse = (sum(each[part]) for each in (linear, attention, experts))
            flops = StageFlops(len(linear[part]), inside, scores, sparse, head if last else 0.0)
            ranks[run.rank_of_stage(stage.index)].append(flops)
        return CostShares(footprint, tuple(map(tuple, ranks)))
