"""Libraries that only some steps need."""

from __future__ import annotations

import importlib
from typing import Any

from headrace.base.errors import ConfigError


def need(module: str, *, package: str, field: str) -> Any:
    """The module, imported.

    Args:
        module: what to import.
        package: what pip calls it.
        field: the config field that asks for it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        why = f"it needs the package '{package}' ({error})"
        raise ConfigError(field, why=why, remedy=f"pip install {package}") from None
