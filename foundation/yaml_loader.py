"""A PyYAML loader that reads plain values as YAML 1.2 (core schema) and JSON do.

PyYAML implements YAML 1.1, in which `no` and `off` are booleans, `1e-4` is a string, `1_000` and `1:30` are numbers and
`2024-01-01` is a date. Repeated keys and keys that are not text are refused with their line.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from foundation.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
# YAML 1.2.2, section 10.3.2: tag resolution of the core schema
_PLAIN = {
    "null": (r"(?:~|null|Null|NULL|)", "~nN"),
    "bool": (r"(?:true|True|TRUE|false|False|FALSE)", "tTfF"),
    "int": (r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)", "-+0123456789"),
    "float": (
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))",
        "-+.0123456789",
    ),
}


class Yaml12Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A loader of YAML 1.2, for `yaml.load`."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Makes an object whose keys must be distinct texts."""
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key, line = self.construct_object(key_node), key_node.start_mark.line + 1
            if key == "<<":
                remedy = 'repeat the keys, or use "extends"'
                raise ConfigError("<<", why=f"merge keys are not read (line {line})", remedy=remedy)
            if not isinstance(key, str):
                raise ConfigError(str(key), why=f"keys are text (line {line})", remedy=f'write "{key}" in quotes')
            if key in seen:
                why = f"the key appears twice in one object (line {line})"
                raise ConfigError(key, self.construct_object(value_node), why=why, remedy="keep one of the two")
            seen.add(key)
        whole: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return whole


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


for _name, (_pattern, _first) in _PLAIN.items():
    Yaml12Loader.add_implicit_resolver(
        f"{_TAG}{_name}", re.compile(f"{_pattern}$"), [*_first, *([""] * (_name == "null"))]
    )
Yaml12Loader.add_constructor(f"{_TAG}int", _int)
