"""A user's torch scheduler, which only the engine steps, once per optimizer step."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from foundation.errors import ConfigError, TrainingError

_OWN = "_headrace_scheduler"
"""Attribute of a scheduler's new class that holds its former class."""


def take_over(scheduler: Any) -> None:
    """Makes a call of `scheduler.step()` in the user's loop an error: the learning rate would change twice.

    The object gets a subclass of its class, so that its `state_dict` and `isinstance` stay as they are.

    Raises:
        ConfigError: `step` needs arguments, such as the loss of `ReduceLROnPlateau`, which the engine does not have.
    """
    cls = type(scheduler)
    if hasattr(cls, _OWN):  # an earlier `prepare`
        return
    needed = [p.name for p in inspect.signature(scheduler.step).parameters.values() if p.default is p.empty]
    if any(name not in ("args", "kwargs") for name in needed):
        why = f"its step needs {', '.join(needed)}, and the engine steps a scheduler after every optimizer step"
        remedy = "do not pass it to prepare, and step it in your loop"
        raise ConfigError("scheduler", cls.__name__, why=why, remedy=remedy)

    def step(_self: Any, *_args: Any, **_kwargs: Any) -> None:
        raise TrainingError(
            "scheduler.step() was called in the loop, and the engine steps the scheduler after every optimizer step:"
            " the learning rate would change twice\n  try: remove the call, or do not pass the scheduler to prepare"
        )

    scheduler.__class__ = type(cls.__name__, (cls,), {"step": step, _OWN: cls, "__module__": cls.__module__})


def step_taken_over(scheduler: Any) -> None:
    """Steps a scheduler after `take_over`."""
    getattr(type(scheduler), _OWN).step(scheduler)


def refuse_second_schedule(kind: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuses a torch scheduler on the optimizer beside the config's: both would set the learning rate.

    torch marks an optimizer's `step` once a scheduler was made for it.

    Args:
        kind: the config's `scheduler.type`.
        optimizer: the user's optimizer.

    Raises:
        ConfigError: the optimizer has such a scheduler.
    """
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        why = "a torch scheduler was made for the optimizer, and both would set its learning rate"
        raise ConfigError("scheduler.type", kind, why=why, remedy="use one of the two")
