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

import torch
from torch import Tensor, nn

from foundation.errors import ConfigError
from pipeline.engines.parallel.stage_messages import CarriedTensor, StageMessage
from pipeline.engines.parallel.stage_plan import StagePlan, stage_plan
from pipeline.models.multi_token import modules_of


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
    bare_ends: bool = False,
) -> list[StageLayers]:
    """Splits layers into consecutive stages that minimize the time of the slowest stage (dynamic programming).

    Args:
        costs: cost of every layer, in any unit.
        head: cost of the final norm and head, which belong to the last stage.
        stages: number of stages; every stage gets at least one layer, but as `bare_ends` says.
        speeds: speed of every stage's device, in any unit; None for equal speeds. A stage's time is its cost / speed.
        limit: function (stage, its first layer) -> largest end of a stage that fits its device; None for no limit.
        bare_ends: whether the last stage, and if need be the first one, has no layer where there are fewer layers than
            stages, as Megatron counts head and embedding as layers: 126 layers in 16 x 8 stages.

    Returns:
        The stages with their costs; none if no split is within the limits.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    layers = len(costs)
    least = _least_layers(layers, stages, bare_ends=bare_ends)
    total = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        return total[end] - total[start] + (head if stage == stages - 1 else 0.0)

    def seconds(stage: int, start: int, end: int) -> float:
        return cost(stage, start, end) / (speeds[stage] if speeds is not None else 1.0)

    # best[k][n]: the smallest possible maximum for the first n layers in k stages, and the first layer of the last
    # stage
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(stages):
        # stages after this one need layers; the last one ends with the last layer
        last = layers - sum(least[stage + 1 :])
        found: dict[int, tuple[float, int]] = {}
        for start, (before, _) in best[-1].items():
            most = last if limit is None else min(last, limit(stage, start))
            for end in range(max(start + least[stage], layers if stage == stages - 1 else 0), most + 1):
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


def _least_layers(layers: int, stages: int, *, bare_ends: bool) -> list[int]:
    """Returns the smallest number of layers of each stage; see `split_layers`."""
    bare = max(0, stages - layers)
    if bare > 2 * bare_ends or not layers:
        why = f"the model has {layers} decoder layers, and every stage needs one"
        raise ConfigError("parallel.pp", stages, why=why, remedy=f"use at most {layers} stages in all")
    return [int(bare < 2), *(1,) * (stages - 2), int(bare < 1)] if stages > 1 else [1]


def layer_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Returns name and modules of the decoder layers.

    Raises:
        ConfigError: the model cannot be divided into pipeline stages; see `stage_plan`.
    """
    name = stage_plan(model).layers
    layers = model.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    return name, layers


class PassThrough(nn.Module):
    """Replaces a layer that belongs to another stage: returns its input, as the layer returns its output.

    Args:
        layer: the layer; the model may read its plain attributes, e.g. the kind of its attention.
        outputs: number of values in the tuple that a layer returns; 0 for a tensor.
        copies: whether the model may change its embeddings in place (CTRL), which are the received states.
        carried: the tensors that stages send; empty if these are nothing but hidden states.

    Attributes:
        states: hidden states [B, T, D] to return instead of the input, e.g. those received from the previous stage.
        keeps: whether to keep the hidden states, which the stage then sends to the next one.
        kept: the last hidden states.
    """

    keeps = False
    states: Tensor | None = None
    kept: Tensor | None = None

    def __init__(
        self, layer: nn.Module, *, outputs: int = 0, copies: bool = False, carried: tuple[CarriedTensor, ...] = ()
    ) -> None:
        super().__init__()
        self._outputs, self.copies, self.carried = outputs, copies, carried
        named = {key: getattr(layer, key, None) for key in (*vars(type(layer)), *vars(layer)) if key[0] != "_"}
        for key, value in named.items():
            if isinstance(value, (str, int, float)) and key not in ("training", "call_super_init", "dump_patches"):
                setattr(self, key, value)

    def __getattr__(self, key: str) -> Any:
        if key in (found := self.__dict__.get("_modules", {})):
            return found[key]
        raise AttributeError(f"the model reads {key} of a layer that is in another stage")

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """Returns the hidden states."""
        states = hidden_states if self.states is None else self.states
        self.kept = states if self.keeps else None
        return (states, *(None,) * (self._outputs - 1)) if self._outputs else states


class Absent(nn.Module):
    """Replaces a module outside of the layers that belongs to another stage: its output is not used.

    Args:
        width: features of the output; None if the output has the shape of the input (norms).
        dtype: dtype of the output.
        positions: whether the output for ids has their positions, else it is [1, 1, D].

    Attributes:
        weight: a number of the dtype, for models that read the dtype of a norm's weight (Zaya).
    """

    def __init__(self, *, width: int | None, dtype: torch.dtype, positions: bool = False) -> None:
        super().__init__()
        self._width, self._positions = width, positions
        self.weight = torch.ones((), dtype=dtype, device="cpu")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the first input if it has the output's shape, else zeros [..., D]."""
        first = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        if self._width is None or (first.shape[-1] == self._width and first.ndim > 2):
            return first
        if first.ndim < 3:  # ids, positions, or a mask of them (OPT)
            shape = first.shape if self._positions else (1, 1)
            return torch.zeros(*shape, self._width, dtype=self.weight.dtype, device=first.device)
        return first.new_zeros(*first.shape[:-1], self._width)


def keep_stage(model: nn.Module, stage: StageLayers) -> None:
    """Removes the modules of other stages in place. The names of the remaining parameters do not change.

    The model's own forward pass still runs from end to end. The layer before the stage's first one returns what the
    previous stage sent; the layer after its last one keeps what the next stage gets (`StageEnds`).

    Args:
        model: a full Hugging Face causal language model, on meta. The last stage keeps a copy of a head tied to the
            embedding.
        stage: the stage to keep.
    """
    plan = stage_plan(model)
    embedding = model.get_input_embeddings() if stage.last and modules_of(model) else None  # type: ignore[operator]
    looked_up = next((name for name, module in model.named_modules() if module is embedding), None)
    layers = layer_list(model)[1]
    for index, layer in enumerate(layers):
        if not stage.layers[0] <= index < stage.layers[1]:
            layers[index] = PassThrough(layer, outputs=plan.outputs, copies=plan.derived, carried=plan.carried)
    absent = (*(() if stage.first else plan.before), *(() if stage.last else plan.after))
    for name in absent:
        nested = any(name.startswith(f"{other}.") for other in absent)  # Inkling 2 has a norm within its embedding
        if not nested and name != looked_up:
            _remove(model, name, plan)


def _remove(model: nn.Module, name: str, plan: StagePlan) -> None:
    """Replaces a module by `Absent`, or a parameter by the number 1."""
    parent, _, key = name.rpartition(".")
    if key in (owner := model.get_submodule(parent))._parameters:
        del owner._parameters[key]
        setattr(owner, key, torch.ones((), device="cpu"))
        return
    module = model.get_submodule(name)
    width: Any = model.config.hidden_size  # type: ignore[union-attr]
    if plan.carried:
        width = getattr(module, "embedding_dim", getattr(module, "out_features", None))
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    model.set_submodule(name, Absent(width=width, dtype=dtype, positions=bool(plan.carried)))


class LayerEntry:
    """Gives the model's first layer the states that another stage, which has no layer, sent; as `PassThrough` does.

    Hooks of layers are outside of recomputation and of compiled code.
    """

    copies = True
    states: Tensor | None = None

    def __init__(self, layer: nn.Module) -> None:
        self.kept: Tensor | None = None
        layer.register_forward_pre_hook(self._replace, with_kwargs=True)

    def _replace(self, _layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return ((self.states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": self.states})


class LayerExit:
    """Keeps what the model's last layer returns, for a stage that has none."""

    kept: Tensor | None = None

    def __init__(self, layer: nn.Module) -> None:
        self.states: Tensor | None = None
        layer.register_forward_hook(self._keep)

    def _keep(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        self.kept = output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class StageEnds:
    """The replaced layers beside those of a stage.

    Attributes:
        before: the layer before the stage's first one; its entry if it is the model's first; None in the first stage.
        after: the layer after the stage's last one; its exit if it is the model's last; None in the last stage.
        message: the messages of the stage if more than hidden states are sent; else None.
    """

    before: PassThrough | LayerEntry | None
    after: PassThrough | LayerExit | None
    message: StageMessage | None = None

    @classmethod
    def of(cls, model: nn.Module, *, dtype: torch.dtype, first: bool, last: bool) -> StageEnds:
        """Finds them in a model reduced by `keep_stage`; none in a full model.

        Args:
            model: the model.
            dtype: dtype of messages.
            first, last: whether the stage is the first or the last one.
        """
        lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
        for layers in lists:
            replaced = [isinstance(layer, PassThrough) for layer in layers]
            if any(replaced):
                if all(replaced):  # a stage without layers is the first or the last one
                    begin = end = 0 if first else len(replaced)
                else:
                    begin, end = replaced.index(False), len(replaced) - replaced[::-1].index(False)
                before = layers[begin - 1] if begin else None if first else LayerEntry(layers[0])
                after = layers[end] if end < len(layers) else None if last else LayerExit(layers[-1])
                carried: Any = layers[replaced.index(True)].carried
                if carried:
                    return cls(None, None, StageMessage(list(layers), carried, (begin, end), dtype=dtype))
                if isinstance(after, PassThrough):
                    after.keeps = True
                return cls(before, after)  # type: ignore[arg-type]
        return cls(None, None)

    def receive(self, states: Tensor) -> Tensor:
        """Sets the hidden states that the previous stage sent; returns embeddings of their shape, to be replaced."""
        assert self.before is not None
        self.before.states = states
        return states.detach().clone() if self.before.copies else states.detach()

    def sent(self) -> Tensor:
        """Returns the hidden states for the next stage, and forgets all of them."""
        assert self.after is not None
        kept = self.after.kept
        assert kept is not None, "the layer after the stage did not run"
        return kept

    def forget(self) -> None:
        """Drops references to hidden states, which belong to the finished forward pass."""
        for each in (self.before, self.after):
            if each is not None:
                each.states = each.kept = None


def is_tied(model: Any) -> bool:
    """Whether the first and the last stage of a full model both need the embedding's weight: for the head or modules
    that predict more tokens."""
    return bool(modules_of(model)) or model.get_output_embeddings().weight is model.get_input_embeddings().weight


def shared_between_stages(model: nn.Module, stages: Sequence[StageLayers]) -> dict[str, tuple[int, ...]]:
    """Maps weights of layers in several stages (Zamba's attention) to the indices of the stages."""
    found: dict[int, tuple[str, set[int]]] = {}
    layers = layer_list(model)[1]
    for stage in stages:
        for layer in layers[slice(*stage.layers)]:
            for name, parameter in layer.named_parameters():
                found.setdefault(id(parameter), (name, set()))[1].add(stage.index)
    return {name: tuple(sorted(indices)) for name, indices in found.values() if len(indices) > 1}
