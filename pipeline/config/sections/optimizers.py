"""The optimizers of a run: their state tensors, whether their update is element-wise, their parameters. No torch.

`OptimizerKind` is all that checkpoints, engines and the memory table know of an optimizer besides its `step`. What is
built from it is in `pipeline/engines/optim`. The decision: docs/decisions/0015-optimizers.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_FP32_BYTES = 4


class UpdateScope(StrEnum):
    """What the update of one element of a parameter depends on."""

    ELEMENT = "element"
    """On the values, gradients and states of that element alone: exact on any piece of a parameter."""
    MATRIX = "matrix"
    """On the whole matrix it is in (Muon): every layout has to gather the matrix before the update."""


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer as checkpoints and layouts see it. Two runs of equal kinds can exchange optimizer state.

    Attributes:
        name: the `optimizer.type`.
        states: names of its state tensors, each fp32 and of the parameter's shape, as the optimizer names them.
        counts_steps: whether it keeps a step counter (bias correction), the scalar `optimizer_step` of a checkpoint.
        scope: what the update of an element depends on.
    """

    name: str
    states: tuple[str, ...]
    counts_steps: bool = False
    scope: UpdateScope = UpdateScope.ELEMENT

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of the fp32 master weight and of the states of one parameter: what a checkpoint holds of it."""
        return _FP32_BYTES * (1 + len(self.states))

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.states) or 'no state'})"


ADAMW = OptimizerKind("AdamW", ("exp_avg", "exp_avg_sq"), counts_steps=True)
LION = OptimizerKind("Lion", ("exp_avg",))
SGD = OptimizerKind("SGD", ())
SGD_MOMENTUM = OptimizerKind("SGD", ("momentum_buffer",))
KINDS = (ADAMW, LION, SGD, SGD_MOMENTUM)

CODE_BLOCK = 256
"""Numbers that share a scale where moments are held in 8 bits."""
MOMENTS_BYTES: dict[str | None, float] = {None: 4, "fp32": 4, "bf16": 2, "8bit": 1 + 4 / CODE_BLOCK}
"""`optimizer.params.moments_dtype` -> bytes per element of a state tensor in memory."""

_EVERY = frozenset({"lr", "weight_decay"})
_ADAM = _EVERY | {"betas", "eps", "torch_adam", "adam_w_mode", "moments_dtype"}
PARAMETERS: dict[str, frozenset[str]] = {
    "AdamW": _ADAM,
    "Adam": _ADAM,
    "Lion": _EVERY | {"betas"},
    "SGD": _EVERY | {"momentum", "nesterov"},
}
"""`optimizer.type` -> the names of `optimizer.params` that it takes."""

_BETAS = (0.9, 0.999)
_ADAM_DEFAULTS = {"betas": _BETAS, "eps": 1e-8, "torch_adam": True, "adam_w_mode": True}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "AdamW": _ADAM_DEFAULTS,
    "Adam": _ADAM_DEFAULTS,
    "Lion": {"betas": _BETAS},  # of DeepSpeed's Lion; the paper's are 0.9 and 0.99
    "SGD": {"momentum": 0.0, "nesterov": False},
}
"""`optimizer.type` -> the defaults of the parameters that not every type has; DeepSpeed's and torch's."""


def kind_of(optimizer: Mapping[str, Any]) -> OptimizerKind:
    """The kind of an `optimizer` section: of a config as JSON, or of the manifest of a run or checkpoint.

    Args:
        optimizer: `type` (AdamW without one) and `params`.

    Raises:
        KeyError: no such type.
    """
    params = optimizer.get("params") or {}
    if optimizer.get("type") == "SGD":
        return SGD_MOMENTUM if params.get("momentum") else SGD
    return {"AdamW": ADAMW, "Adam": ADAMW, "Lion": LION}[optimizer.get("type", "AdamW")]


_TENSORS = "its update of an element depends on the whole tensor ({}), and layouts hand an optimizer pieces of tensors"
_OWN_WIRE = "it compresses and reduces gradients between ranks itself, so that the layout would enter the loss curve"
_WIDTHS = "muP's learning rates are those of a parametrization here, not of an optimizer"
_COMPLETEP = "use AdamW with model.parametrization completep and model.base, which scale it as muP does"
_LIBRARY = "it is element-wise, but not one of the optimizers of headrace train"
_OURS = "use AdamW, Lion or SGD"
_OWN_LOOP = f"{_OURS}, or your own loop (docs/how-to/own-loop.md), which takes any element-wise torch optimizer"

REFUSED_TYPES: dict[str, tuple[str, str]] = {
    "adafactor": (_TENSORS.format("means of its rows and columns"), _OURS),
    "lamb": (_TENSORS.format("a trust ratio of norms"), _OURS),
    "lars": (_TENSORS.format("a trust ratio of norms"), _OURS),
    "muon": (_TENSORS.format("its momentum is orthogonalized"), _OURS),
    "shampoo": (_TENSORS.format("preconditioners of its dims"), _OURS),
    "soap": (_TENSORS.format("preconditioners of its dims"), _OURS),
    "prodigy": (_TENSORS.format("one step size is estimated from all of them"), _OURS),
    "onebitadam": (_OWN_WIRE, _OURS),
    "zerooneadam": (_OWN_WIRE, _OURS),
    "onebitlamb": (_OWN_WIRE, _OURS),
    "muadam": (_WIDTHS, _COMPLETEP),
    "muadamw": (_WIDTHS, _COMPLETEP),
    "musgd": (_WIDTHS, _COMPLETEP),
    **dict.fromkeys(("adagrad", "adadelta", "adamax", "nadam", "radam", "rmsprop"), (_LIBRARY, _OWN_LOOP)),
}
"""Lower-case names of known optimizers that are not supported -> (why, what to do instead)."""
