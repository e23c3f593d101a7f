"""A user's own tracker, named in the config's `sinks` as "module:function"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from foundation.user_function import UserFunction
from pipeline.runtime.metrics.sinks import OneWarning


class UserSink:
    """Hands rows to an object of the user. A failure gives one warning, and training continues.

    Args:
        function: the user's function; called with the run's directory and its config, it returns the object.
        run_dir: the run's directory.
        config: config of the run.
        field: key of the config, for messages.

    Raises:
        ConfigError: the function fails, or its object has no method `write`.
    """

    def __init__(self, function: UserFunction, run_dir: Path, *, config: dict[str, Any], field: str) -> None:
        self._try = OneWarning(f"the tracker {function.name} failed")
        remedy = "def open_sink(run_dir, config): return an object with write(kind, step, **values) and close()"
        try:
            self._sink = function.call(run_dir, config)
        except Exception as error:  # the user's code runs here
            why = f"the function failed with {type(error).__name__}: {error}"
            raise ConfigError(field, function.name, why=why, remedy=remedy) from error
        if not callable(getattr(self._sink, "write", None)):
            why = f"it returned {self._sink!r}, which has no method write"
            raise ConfigError(field, function.name, why=why, remedy=remedy)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Hands a row on."""
        self._try(lambda: self._sink.write(kind, step, **values))

    def close(self) -> None:
        """Closes the user's object, if it can be closed."""
        self._try(getattr(self._sink, "close", lambda: None))
