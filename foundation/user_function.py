"""Functions that users write, named in a config as "module:function", such as `loss.function`.

The module is one that Python finds: beside the command in the working directory, on PYTHONPATH, or installed. Checks
of a config look at the spelling only; a run imports the module on every rank.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from foundation.errors import ConfigError, RefusedValueError

_SPELLING = re.compile(r"(?!.*\.py:)[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _names_a_function(value: str) -> str:
    if _SPELLING.fullmatch(value) is None:
        remedy = "write module:function, e.g. my_parts:make for the function make in my_parts.py; no path, no .py"
        raise RefusedValueError("it does not name a function of a module", remedy)
    return value


FunctionName = Annotated[str, AfterValidator(_names_a_function)]
"""Type of a config field that names a function as "module:function"."""


@dataclass(frozen=True)
class UserFunction:
    """An imported function.

    Attributes:
        name: "module:function".
        call: the function.
        path: file of the module.
    """

    name: str
    call: Callable[..., Any]
    path: Path

    def described(self) -> dict[str, str]:
        """Returns the name, and the SHA-256 of the module's file; modules that it imports are not part of it."""
        return {"function": self.name, "source_sha256": hashlib.sha256(self.path.read_bytes()).hexdigest()}


def load_function(name: str, *, field: str) -> UserFunction:
    """Imports a function.

    Args:
        name: "module:function".
        field: dotted path of the config key, for messages.

    Raises:
        ConfigError: the module is not found or fails, or has no function of this name.
    """
    module_name, _, function = name.partition(":")
    try:
        _find_modules_here()
        module = import_module(module_name)
    except Exception as error:  # the user's code runs here
        why = f"the module {module_name} cannot be imported: {type(error).__name__}: {error}"
        where = f"start in the folder of {module_name.partition('.')[0]}.py, or set PYTHONPATH to it"
        raise ConfigError(field, name, why=why, remedy=where) from error
    call, path = getattr(module, function, None), getattr(module, "__file__", None)
    if not callable(call) or path is None:
        own = sorted(key for key, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__)
        why = f"{path or module_name} has no function {function}"
        raise ConfigError(field, name, why=why, remedy=f"name one of its own: {', '.join(own) or 'it has none'}")
    return UserFunction(name, call, Path(path))


def modules_here(config: Any) -> set[Path]:
    """Returns the files or package folders in the working directory whose functions a config's values name."""
    if isinstance(config, str):
        top = Path.cwd() / re.split("[.:]", config)[0]
        found = {top, top.with_suffix(".py")} if _SPELLING.fullmatch(config) else set()
        return {path for path in found if path.exists()}
    values = config.values() if isinstance(config, Mapping) else config if isinstance(config, list | tuple) else ()
    return {path for value in values for path in modules_here(value)}


def spelled(function: Callable[..., Any]) -> str | None:
    """Returns "module:function" of a function; None if another process cannot import it (a lambda, a notebook's)."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found = f"{module}:{name}"
    return found if module not in (None, "__main__", "builtins") and _SPELLING.fullmatch(found) else None


def _find_modules_here() -> None:
    """Lets modules in the working directory be found, after all others; it stays so, for what they import later."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
