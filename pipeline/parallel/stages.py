"""Pipeline stages: which decoder layers a stage computes, balanced by cost, and a model cut down to one stage.

A stage's cost is the floating-point operations of its forward pass per token. The embedding is a lookup and costs
nothing; the head is a matrix product as large as several layers, so that the last stage gets fewer layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from headrace.base.errors import ConfigError


@dataclass(frozen=True)
class StageLayers:
    """One piece of a model.

    Attributes:
        index: its place, 0 takes the ids.
        count: number of stages.
        layers: (first, end) numbers of its decoder layers.
        cost: FLOPs of its forward pass, per token.
    """

    index: int
    count: int
    layers: tuple[int, int]
    cost: float

    @property
    def first(self) -> bool:
        """It has the embedding."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """It has the final norm and the head."""
        return self.index == self.count - 1


def split(costs: Sequence[float], *, head: float, stages: int) -> list[StageLayers]:
    """Cuts layers into consecutive pieces so that the most expensive piece costs as little as possible.

    Args:
        costs: of every layer, in any unit.
        head: of the final norm and head, which go with the last layers.
        stages: number of pieces; every piece gets at least one layer.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    layers = len(costs)
    if layers < stages:
        why = f"the model has {layers} decoder layers, and every stage needs one"
        raise ConfigError("parallel.pp", stages, why=why, remedy=f"use at most {layers} stages in all")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[k][n]: the smallest possible maximum for the first n layers in k pieces, and where the last piece begins
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for k in range(1, stages + 1):
        tail = head if k == stages else 0.0
        ends = range(k, layers - (stages - k) + 1)
        best.append(
            {
                end: min(
                    (max(best[k - 1][start][0], total[end] - total[start] + tail), start)
                    for start in best[k - 1]
                    if start < end
                )
                for end in ends
            }
        )
    bounds = [layers]
    for k in range(stages, 0, -1):
        bounds.append(best[k][bounds[-1]][1])
    bounds.reverse()
    pairs = list(pairwise(bounds))
    return [
        StageLayers(i, stages, pair, total[pair[1]] - total[pair[0]] + (head if i == stages - 1 else 0.0))
        for i, pair in enumerate(pairs)
    ]


def layer_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and modules of the decoder layers.

    Raises:
        ConfigError: the architecture does not say how it is cut into stages, or is cut in a way that is not offered.
    """
    config: Any = model.config
    plan = getattr(config, "base_model_pp_plan", None)
    if not plan:
        raise ConfigError(
            "parallel.pp",
            why=f"transformers has no base_model_pp_plan for {config.model_type}: nobody says how it is cut",
            remedy="use ZeRO or FSDP2 (parallel.pp 1), or another architecture, e.g. llama",
        )
    base: Any = model.base_model
    lists = [(name, getattr(base, name)) for name in plan if isinstance(getattr(base, name, None), nn.ModuleList)]
    if len(lists) != 1:
        why = f"the plan of {config.model_type} names {len(lists)} lists of layers; one is offered"
        raise ConfigError("parallel.pp", why=why, remedy="use ZeRO or FSDP2 for this architecture (parallel.pp 1)")
    prefix = f"{model.base_model_prefix}."
    heads = {id(p) for p in model.get_output_embeddings().parameters()}  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        planned = name.startswith(prefix) and name.removeprefix(prefix).split(".")[0] in plan
        if not planned and id(parameter) not in heads:
            why = f"the plan of {config.model_type} does not say which stage has {name}"
            raise ConfigError("parallel.pp", why=why, remedy="use ZeRO or FSDP2 for this architecture (parallel.pp 1)")
    return lists[0]


def placed_before_layers(model: nn.Module) -> list[str]:
    """Names of the base model's modules that the first stage has besides layers: those the plan lists before them."""
    plan = list(model.config.base_model_pp_plan)  # type: ignore[union-attr, arg-type]
    return plan[: plan.index(layer_list(model)[0])]


class Absent(nn.Module):
    """Stands where another stage has a module: hands on what it gets."""

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """Its first argument."""
        return hidden_states


def cut_to_stage(model: nn.Module, stage: StageLayers) -> None:
    """Removes in place what other stages compute. Names of what stays do not change.

    Args:
        model: a whole Hugging Face causal language model, on meta. A head tied to the embedding stays with the last
            stage as its copy.
    """
    list_name, layers = layer_list(model)
    early = placed_before_layers(model)
    base: Any = model.base_model
    plan: dict[str, Any] = model.config.base_model_pp_plan  # type: ignore[union-attr, assignment]
    for number in range(len(layers)):
        if not stage.layers[0] <= number < stage.layers[1]:
            layers[number] = Absent()
    for name in plan:
        has = stage.first if name in early else stage.last
        if name != list_name and not has:
            setattr(base, name, Absent())
    if not stage.last:
        model.set_output_embeddings(Absent())  # type: ignore[operator]


def is_tied(model: Any) -> bool:
    """The head of a whole model is its embedding."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight
