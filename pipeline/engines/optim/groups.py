"""Parameter groups: weight decay, and learning rate and epsilon per parameter if the parametrization scales them.

Groups keep the order of the model's parameters. The loop sets one learning rate; each group multiplies it by its
`lr_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.config.sections.optimizers import OptimizerParams

LR_SCALE = "lr_scale"
"""Key of a parameter group for the ratio of its learning rate to the run's; 1 if absent."""
MATRICES = "matrices"
"""Key of a parameter group: whether Muon treats its parameters as hidden matrices."""


@dataclass(frozen=True, order=True)
class UpdateScale:
    """Factors on the optimizer's hyperparameters for one parameter.

    Attributes:
        weight_decay: factor on `weight_decay`; 0 for vectors.
        lr: factor on the learning rate of every step.
        eps: factor on AdamW's epsilon.
        matrix: whether the optimizer treats the parameter as a hidden matrix; only Muon does.
    """

    weight_decay: float = 1.0
    lr: float = 1.0
    eps: float = 1.0
    matrix: bool = False


DECAYED, NOT_DECAYED = UpdateScale(), UpdateScale(weight_decay=0.0)


def parameter_groups(
    parameters: Mapping[str, Tensor], scales: Mapping[str, UpdateScale], params: OptimizerParams
) -> list[dict[str, Any]]:
    """Makes the parameter groups of an optimizer, one for each distinct `UpdateScale`.

    Args:
        parameters: the tensors that the optimizer updates, by Hugging Face name.
        scales: update scale of every parameter in the model, by name.
        params: the config's `optimizer.params`.

    Returns:
        The groups, those with weight decay first. Number and order are the same on every rank; some may be empty.
    """
    return [
        {
            "params": [p for name, p in parameters.items() if scales[name] == scale],
            "weight_decay": params.weight_decay * scale.weight_decay,
            **({LR_SCALE: rate} if (rate := scale.lr * _own_rate(params, scale)) != 1.0 else {}),
            **({"eps": params.eps * scale.eps} if scale.eps != 1.0 and params.eps is not None else {}),
            **({MATRICES: True} if scale.matrix else {}),
        }
        for scale in sorted(set(scales.values()), key=_order)
    ]


def _own_rate(params: OptimizerParams, scale: UpdateScale) -> float:
    """Returns the learning rate of Muon's matrices or of its AdamW part, relative to the schedule's `lr`."""
    own = params.muon_lr if scale.matrix else params.adam_lr
    return 1.0 if own is None else own / params.lr


def without_empty_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fills every empty group with a parameter, and the options, of the largest group.

    DeepSpeed's ZeRO reduces a norm for each group over the ranks that share the model. Pipeline stages therefore need
    equally many groups, and none may be empty. A parameter's group does not change its update.
    """
    filled = [{**group, "params": list(group["params"])} for group in groups]
    for number, group in enumerate(filled):
        if not group["params"]:
            largest = max(filled, key=lambda each: len(each["params"]))
            assert len(largest["params"]) > 1, "fewer parameters than groups"
            filled[number] = {**largest, "params": [largest["params"].pop()]}
    return filled


def _order(scale: UpdateScale) -> tuple[bool, UpdateScale]:
    return scale.weight_decay == 0.0, scale


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of a step: `lr` times each group's `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_SCALE, 1.0)
