"""Optimizer states by number, as `torch.optim` has them: which number is which parameter.

`Optimizer.state_dict()` numbers the parameters in the order of its groups, and keeps no names. The order within a group
is that of the model; which parameters form a group is found by trying the rules that trainers use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.base.errors import CheckpointError
from pipeline.checkpoint.importing.source import STATES, stored
from pipeline.checkpoint.write.streamed import LazyTensor

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Of the Hugging Face Trainer (transformers 5, `get_decay_parameter_names`)."""
Shapes = Mapping[str, tuple[int, ...]]
_RULES: tuple[Callable[[str, Shapes], bool], ...] = (
    lambda _name, _shapes: True,
    lambda name, _shapes: not _NO_DECAY.search(name),
    lambda name, shapes: len(shapes[name]) > 1,
)
"""Whether a parameter is in the first group: all are, those whose names are no norm's or bias's, the matrices."""


def states_of(
    state: Mapping[str, Any], parameters: Shapes, where: Path
) -> tuple[dict[str, dict[str, LazyTensor]], list[Any]]:
    """The optimizer states by name, and the step counters.

    Args:
        state: of `Optimizer.state_dict()`.
        parameters: name -> shape of those that were trained, in the order of the model.
        where: the file, for an error.

    Raises:
        CheckpointError: no rule gives every number a parameter of its shape.
    """
    own, groups = state["state"], state["param_groups"]
    names = next((each for each in _candidates(groups, parameters) if _fits(each, own, parameters)), None)
    if names is None:
        sizes = " + ".join(str(len(group["params"])) for group in groups)
        raise CheckpointError(
            f"{where} numbers its parameters ({sizes} in {len(groups)} groups), and neither the order of the model's"
            f" {len(parameters)} nor that of the usual groups (all; without norms and biases first) fits\n"
            "  try: save it by dcp.save with names, those of get_optimizer_state_dict (torch.distributed.checkpoint)"
        )
    found: dict[str, dict[str, LazyTensor]] = {}
    for number, name in names.items():
        for kind in STATES:
            if (tensor := own.get(number, {}).get(kind)) is not None:
                found.setdefault(kind, {})[name] = stored(tensor)
    return found, [each.get("step") for each in own.values()]


def _candidates(groups: Sequence[Mapping[str, Any]], parameters: Shapes) -> Iterator[dict[int, str]]:
    """Number -> name, by each rule."""
    numbers = [number for group in groups for number in group["params"]]
    named = [name for group in groups for name in group.get("param_names") or ()]
    if len(named) == len(numbers):
        yield dict(zip(numbers, named, strict=True))
    for rule in _RULES:
        first = [name for name in parameters if rule(name, parameters)]
        rest = [name for name in parameters if name not in set(first)]
        for order in (first + rest, rest + first):
            if len(order) == len(numbers):
                yield dict(zip(numbers, order, strict=True))


def _fits(names: Mapping[int, str], own: Mapping[int, Any], parameters: Shapes) -> bool:
    shapes = {number: {tuple(v.shape) for k, v in each.items() if k in STATES} for number, each in own.items()}
    return all(shapes.get(n, set()) <= {parameters.get(name)} for n, name in names.items())
