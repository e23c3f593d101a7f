"""Functions of the user that a run's config names: loss, callbacks, trackers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foundation.user_function import UserFunction, load_function
from pipeline.config.sections.run import Config


@dataclass(frozen=True)
class UserFunctions:
    """Imported functions; every rank imports all of them.

    Attributes:
        loss: function of `loss.function`; None without one.
        callbacks: functions of `callbacks`, which make hooks.
        sinks: functions of `sinks`, which open trackers.
    """

    loss: UserFunction | None = None
    callbacks: tuple[UserFunction, ...] = ()
    sinks: tuple[UserFunction, ...] = ()

    def curve(self) -> dict[str, Any]:
        """Returns the fields that must be the same on resume: a loss and callbacks with the hash of their source.

        Empty without any, as in checkpoints older than these keys. A tracker cannot change the curve.
        """
        loss = {} if self.loss is None else {"loss.function": self.loss.described()}
        return loss | ({"callbacks": [each.described() for each in self.callbacks]} if self.callbacks else {})


NO_FUNCTIONS = UserFunctions()
"""The functions of a config that names none."""


def load_functions(config: Config) -> UserFunctions:
    """Imports the functions that a config names, and tries the loss.

    Raises:
        ConfigError: a function cannot be imported, or the loss is not what `loss.function` needs.
    """
    loss = None
    if config.loss.function is not None:
        from pipeline.engines.user_loss import FIELD, check_user_loss  # noqa: PLC0415

        loss = load_function(config.loss.function, field=FIELD)
        check_user_loss(loss)
    callbacks = tuple(load_function(each, field=f"callbacks.{i}") for i, each in enumerate(config.callbacks))
    sinks = tuple(load_function(each, field=f"sinks.{i}") for i, each in enumerate(config.sinks))
    return UserFunctions(loss, callbacks, sinks)
