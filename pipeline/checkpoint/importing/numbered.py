"""Finds the parameter of each number in optimizer states of `torch.optim`.

`Optimizer.state_dict()` numbers the parameters group by group, and stores no names. Within a group they are in the
order of the model. The members of a group are found by trying the rules that trainers use; groups that fit no rule are
refused, since parameters of one shape cannot be told apart. FSDP's full state dict has names instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.errors import CheckpointError
from pipeline.checkpoint.importing.source import hugging_face_name, is_state, stored
from pipeline.checkpoint.write.streamed import LazyTensor

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Pattern of names without weight decay in the Hugging Face Trainer (transformers 5, `get_decay_parameter_names`)."""
Shapes = Mapping[str, tuple[int, ...]]
_RULES: tuple[Callable[[str, Shapes], bool], ...] = (
    lambda name, _shapes: not _NO_DECAY.search(name),
    lambda name, shapes: len(shapes[name]) > 1,
)
"""Rules for the first of two groups: parameters that are not norms or biases by name; or all matrices."""


@dataclass(frozen=True)
class NamedStates:
    """States of an optimizer by name.

    Attributes:
        states: state -> parameter name -> value.
        counters: step counters.
        members: names of the parameters of each group.
    """

    states: dict[str, dict[str, LazyTensor]]
    counters: list[Any]
    members: list[list[str]]


def states_of(state: Mapping[str, Any], parameters: Shapes, where: Path) -> NamedStates:
    """Returns the optimizer states by name.

    Args:
        state: result of `Optimizer.state_dict()`, or FSDP's full optimizer state dict.
        parameters: name -> shape of the trained parameters, in the order of the model.
        where: the file, for an error.

    Raises:
        CheckpointError: no rule gives every number a parameter of its shape, or two rules give different parameters.
    """
    own, groups = state["state"], state["param_groups"]
    names = _recorded_names(groups) or _found(own, groups, parameters, where)
    found: dict[str, dict[str, LazyTensor]] = {}
    for number, name in names.items():
        for kind, value in own.get(number, {}).items():
            if is_state(value):
                found.setdefault(kind, {})[name] = stored(value)
    members = [[names[number] for number in group["params"]] for group in groups]
    return NamedStates(found, [each.get("step") for each in own.values()], members)


def _recorded_names(groups: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """Maps number to name if the optimizer records names; FSDP's full state has names in place of numbers."""
    numbers = [number for group in groups for number in group["params"]]
    named = [name for group in groups for name in group.get("param_names") or group["params"]]
    told = len(named) == len(numbers) and all(isinstance(name, str) for name in named)
    return {n: hugging_face_name(name) for n, name in zip(numbers, named, strict=True)} if told else {}


def _found(
    own: Mapping[int, Any], groups: Sequence[Mapping[str, Any]], parameters: Shapes, where: Path
) -> dict[Any, str]:
    """Maps number to name, by the rule that yields the optimizer's group sizes and the shapes of its states."""
    numbers, sizes = [n for group in groups for n in group["params"]], [len(group["params"]) for group in groups]
    usual = ([list(parameters)], *(parts for rule in _RULES for parts in _divided(rule, parameters)))
    orders = [order for order in usual if [len(part) for part in order] == [size for size in sizes if size]]
    every = [dict(zip(numbers, (name for part in order for name in part), strict=True)) for order in orders]
    fitting = [names for names in every if _fits(names, own, parameters)]
    if not fitting or any(each != fitting[0] for each in fitting[1:]):
        raise CheckpointError(
            f"{where} numbers its parameters ({' + '.join(map(str, sizes))} in {len(groups)} groups), and "
            f"{'more than one' if fitting else 'none'} of the usual groups of the model's {len(parameters)} parameters"
            " (all in one; norms and biases by themselves) fits: matching states with parameters would be a guess\n"
            "  try: give the optimizer named_parameters(), or save it by dcp.save with the names of"
            " get_optimizer_state_dict (torch.distributed.checkpoint)"
        )
    return fitting[0]


def _divided(rule: Callable[[str, Shapes], bool], parameters: Shapes) -> Iterator[list[list[str]]]:
    """Yields the two groups of a rule, in both orders."""
    first = [name for name in parameters if rule(name, parameters)]
    rest = [name for name in parameters if not rule(name, parameters)]
    if first and rest:
        yield from ([first, rest], [rest, first])


def _fits(names: Mapping[Any, str], own: Mapping[Any, Any], parameters: Shapes) -> bool:
    """Whether every state has the shape of its parameter."""
    shapes = {number: {tuple(v.shape) for v in each.values() if is_state(v)} for number, each in own.items()}
    return all(shapes.get(n, set()) <= {parameters[name]} for n, name in names.items())
