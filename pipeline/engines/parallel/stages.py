"""Pipeline stages: assigns decoder layers to stages, balanced by time, and reduces a model to one stage.

A stage's cost is the FLOPs of its forward pass per token. The embedding is a lookup and costs nothing. The head is a
matrix product as large as several layers, so the last stage gets fewer layers. If devices differ, stages are balanced
by cost / speed, and have no more layers than fit their devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from foundation.errors import ConfigError


@dataclass(frozen=True)
class StageLayers:
    """One pipeline stage (or virtual stage) of a model.

    Attributes:
        index: the stage's index; the input of stage 0 is ids.
        count: number of stages.
        layers: (first, end) indices of the stage's decoder layers.
        cost: FLOPs of the stage's forward pass, per token.
    """

    index: int
    count: int
    layers: tuple[int, int]
    cost: float

    @property
    def first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the stage has the final norm and the head."""
        return self.index == self.count - 1


def split_layers(
    costs: Sequence[float],
    *,
    head: float,
    stages: int,
    speeds: Sequence[float] | None = None,
    limit: Callable[[int, int], int] | None = None,
) -> list[StageLayers]:
    """Splits layers into consecutive stages that minimize the time of the slowest stage (dynamic programming).

    Args:
        costs: cost of every layer, in any unit.
        head: cost of the final norm and head, which belong to the last stage.
        stages: number of stages; every stage gets at least one layer.
        speeds: speed of every stage's device, in any unit; None for equal speeds. A stage's time is its cost / speed.
        limit: function (stage, its first layer) -> largest end of a stage that fits its device; None for no limit.

    Returns:
        The stages with their costs; none if no split is within the limits.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    layers = len(costs)
    if layers < stages:
        why = f"the model has {layers} decoder layers, and every stage needs one"
        raise ConfigError("parallel.pp", stages, why=why, remedy=f"use at most {layers} stages in all")
    total = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        return total[end] - total[start] + (head if stage == stages - 1 else 0.0)

    def seconds(stage: int, start: int, end: int) -> float:
        return cost(stage, start, end) / (speeds[stage] if speeds is not None else 1.0)

    # best[k][n]: the smallest possible maximum for the first n layers in k stages, and the first layer of the last
    # stage
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(stages):
        # every stage after this one needs a layer; the last one ends with the last layer
        last = layers - (stages - stage - 1)
        found: dict[int, tuple[float, int]] = {}
        for start, (before, _) in best[-1].items():
            most = last if limit is None else min(last, limit(stage, start))
            for end in range(max(start + 1, layers if stage == stages - 1 else 0), most + 1):
                way = (max(before, seconds(stage, start, end)), start)
                found[end] = min(found.get(end, way), way)
        best.append(found)
    if layers not in best[-1]:
        return []
    bounds = [layers]
    for found in reversed(best[1:]):
        bounds.append(found[bounds[-1]][1])
    pairs = pairwise(reversed(bounds))
    return [StageLayers(i, stages, pair, cost(i, *pair)) for i, pair in enumerate(pairs)]


def layer_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Returns name and modules of the decoder layers.

    Raises:
        ConfigError: the architecture has no plan for pipeline stages, or an unsupported plan.
    """
    config: Any = model.config
    plan = getattr(config, "base_model_pp_plan", None)
    if not plan:
        raise ConfigError(
            "parallel.pp",
            why=f"transformers has no base_model_pp_plan for {config.model_type}, which splits it into stages",
            remedy="use ZeRO or FSDP2 (parallel.pp 1), or another architecture, e.g. llama",
        )
    base: Any = model.base_model
    lists = [(name, getattr(base, name)) for name in plan if isinstance(getattr(base, name, None), nn.ModuleList)]
    if len(lists) != 1:
        why = f"the plan of {config.model_type} names {len(lists)} lists of layers; only one is supported"
        raise ConfigError("parallel.pp", why=why, remedy="use ZeRO or FSDP2 for this architecture (parallel.pp 1)")
    prefix = f"{model.base_model_prefix}."
    heads = {id(p) for p in model.get_output_embeddings().parameters()}  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        planned = name.startswith(prefix) and name.removeprefix(prefix).split(".")[0] in plan
        if not planned and id(parameter) not in heads:
            why = f"the plan of {config.model_type} assigns {name} to no stage"
            raise ConfigError("parallel.pp", why=why, remedy="use ZeRO or FSDP2 for this architecture (parallel.pp 1)")
    return lists[0]


def modules_before_layers(model: nn.Module) -> list[str]:
    """Returns the names of the base model's modules in the first stage: those that its plan lists before the layers."""
    plan = list(model.config.base_model_pp_plan)  # type: ignore[union-attr, arg-type]
    return plan[: plan.index(layer_list(model)[0])]


class PassThrough(nn.Module):
    """Replaces a module that belongs to another stage: returns its input."""

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """Returns the first argument."""
        return hidden_states


def keep_stage(model: nn.Module, stage: StageLayers) -> None:
    """Removes the modules of other stages in place. The names of the remaining parameters do not change.

    Args:
        model: a full Hugging Face causal language model, on meta. The last stage keeps a copy of a head tied to the
            embedding.
        stage: the stage to keep.
    """
    list_name, layers = layer_list(model)
    first_stage_modules = modules_before_layers(model)
    base: Any = model.base_model
    plan: dict[str, Any] = model.config.base_model_pp_plan  # type: ignore[union-attr, assignment]
    for index in range(len(layers)):
        if not stage.layers[0] <= index < stage.layers[1]:
            layers[index] = PassThrough()
    for name in plan:
        in_stage = stage.first if name in first_stage_modules else stage.last
        if name != list_name and not in_stage:
            setattr(base, name, PassThrough())
    if not stage.last:
        model.set_output_embeddings(PassThrough())  # type: ignore[operator]


def is_tied(model: Any) -> bool:
    """Whether the head and the embedding of a full model share their weight."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight
