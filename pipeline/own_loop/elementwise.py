"""Checks that a user's optimizer may be sharded: its update of an element must depend on no other element.

ZeRO updates flat pieces of all parameters joined together, FSDP2 rows of parameters. An optimizer that uses a whole
tensor (Adafactor's row and column means, Muon's orthogonalization, LAMB's norms) computes a different update from a
piece, without an error. So an optimizer of unknown kind is tried on whole parameters and on flat pieces that cut
through them, with the same gradients. Each piece has its own optimizer, as on a rank.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import ConfigError
from pipeline.config.sections.optimizers import KINDS, UpdateScope

_NAMES = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(getattr(torch.optim, name) for name in _NAMES)
"""torch's element-wise optimizers, by exact class (ours: by module): a derived class may do anything."""
_MODULES = frozenset(kind.module for kind in KINDS if kind.scope is UpdateScope.ELEMENT)

STEPS = 25
"""Steps of a trial: more than the interval (10, 20) at which published optimizers refresh a tensor's statistics."""

TOLERANCE = 1e-4
"""Largest difference as a share of the largest update. Rounding differs by 1e-6 (vector kernels treat a tensor's last
elements separately); on Adafactor's pieces the update differs by 3.7."""

_SHAPES = ((12, 8), (8,), (5, 3, 2))
_CUTS = (50, 40, 44)
"""Sizes of flat pieces of the joined parameters of `_SHAPES`; two pieces cut through a matrix."""


def why_not_elementwise(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the reason why an optimizer cannot be sharded; None when its update is element-wise.

    The optimizer, its state and the parameters stay as they are. Takes milliseconds.
    """
    if type(optimizer) in ELEMENTWISE or type(optimizer).__module__ in _MODULES:
        return None
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        try:
            difference = largest_difference(optimizer, group)
        except Exception as error:  # a user's class may raise anything
            reason = (str(error) or repr(error)).splitlines()[0]
            return f"a trial of {name} on flat pieces of parameters failed ({type(error).__name__}: {reason})"
        if difference is None:
            return f"a trial of {name} changed no weight, so that nothing is known of its update"
        if not difference <= TOLERANCE:
            return (
                f"{name} looks at whole tensors: on pieces of them its update differs by {difference:.2g} of its size"
            )
    return None


def check_elementwise(optimizer: torch.optim.Optimizer, *, engine: str, stage: int, half: bool) -> None:
    """Refuses an optimizer that a sharded layout would run on pieces of parameters, unless it is element-wise.

    Args:
        optimizer: the user's optimizer.
        engine: deepspeed or torch.
        stage: ZeRO stage of the run: at 0 the optimizer sees whole parameters, at other stages pieces.
        half: whether bf16 or fp16 is on, where engine deepspeed runs stage 0 as 1.

    Raises:
        ConfigError: the optimizer is not element-wise.
    """
    reason = None if stage == 0 else why_not_elementwise(optimizer)
    if reason is not None:
        remedy = "zero_optimization.stage 0 with engine torch, where every rank updates whole parameters"
        if engine == "deepspeed" and not half:
            remedy = "zero_optimization.stage 0, where every rank updates whole parameters"
        raise ConfigError(
            "zero_optimization.stage", stage, why=reason, remedy=f"use {remedy}; or an element-wise optimizer (AdamW)"
        )


def largest_difference(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float | None:
    """Largest difference between updates of whole parameters and of pieces, as a share of the largest update.

    Args:
        optimizer: the user's optimizer; a new one of its class is tried, in fp32 on the CPU.
        group: the parameter group whose options are used, at a learning rate of 0.01.

    Returns:
        The largest difference over `STEPS` steps; None if no weight changed. NaN if an update is not finite.
    """
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    whole = [nn.Parameter(tensor.clone()) for tensor in start]
    flat = torch.cat([tensor.view(-1) for tensor in start])
    pieces = [nn.Parameter(piece.clone()) for piece in flat.clone().split(_CUTS)]
    together, apart = _trial(optimizer, group, whole), [_trial(optimizer, group, [piece]) for piece in pieces]
    worst, changed = 0.0, False
    for _step in range(STEPS):
        # sizes from 1e-3 to 1: a whole tensor's statistics differ from its pieces'
        gradient = torch.randn(flat.shape, generator=generator) * 10 ** (-3 * torch.linspace(0, 1, len(flat)))
        before = _joined(whole)
        _step_with(together, whole, gradient)
        for trial, piece, part in zip(apart, pieces, gradient.split(_CUTS), strict=True):
            _step_with(trial, [piece], part)
        size = float((_joined(whole) - before).abs().max())
        changed = changed or size > 0
        if size > 0:
            worst = max(worst, float((_joined(whole) - _joined(pieces)).abs().max()) / size)
        if not bool(torch.isfinite(_joined(whole)).all() & torch.isfinite(_joined(pieces)).all()):
            return float("nan")
    return worst if changed else None


def _trial(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of the same class and options on other parameters, with no state and no hooks."""
    made = object.__new__(type(optimizer))
    # schedulers and profilers of torch put their own `step` on an object; the class's `step` is tried
    for key, value in optimizer.__dict__.items():
        if key not in ("step", "state", "param_groups"):
            made.__dict__[key] = copy.copy(value) if isinstance(value, dict | list | set) else value
    hooks = [key for key in made.__dict__ if key.startswith("_optimizer_") and key.endswith("_hooks")]
    made.__dict__.update({key: OrderedDict() for key in hooks})
    made.state = defaultdict(dict)
    options = {
        key: value for key, value in group.items() if key not in ("params", "param_names", "fused", "capturable")
    }
    rate = {"lr": 0.01} if "lr" in options else {}
    made.param_groups = [{**options, **rate, "fused": None, "capturable": False, "params": parameters}]
    return made


def _step_with(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], gradient: Tensor) -> None:
    parts = gradient.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view(parameter.shape).clone()
    optimizer.step()


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
