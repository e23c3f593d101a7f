"""Import of optional dependencies that only some cleaning steps need."""

from __future__ import annotations

import importlib
from typing import Any

from foundation.errors import ConfigError


def import_optional(module: str, *, package: str, field: str) -> Any:
    """Imports a module of an optional package.

    Args:
        module: name of the module.
        package: name of the package on PyPI.
        field: the config field that needs it.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        why = f"this step needs the package '{package}' ({error})"
        raise ConfigError(field, why=why, remedy=f"pip install {package}") from None
