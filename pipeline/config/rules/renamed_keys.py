"""Config keys that have been renamed: refused with the new name in a config, translated in what was written before.

A config that a user writes has one name for one thing, so an old key is refused. Manifests of runs and checkpoints
keep the keys they were written with; `upgrade_keys` translates them on reading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.base.errors import ConfigError

RENAMED: dict[str, str] = {
    "memory.recompute": "memory.activation_checkpointing",
    "memory.every": "memory.every_n_layers",
    "parallel.shard": "parallel.hybrid_shard_size",
    "parallel.stages_per_rank": "parallel.virtual_stages",
    "parallel.context": "parallel.cp_method",
    "watchdog.silent": "watchdog.heartbeat_timeout",
    "watchdog.stuck": "watchdog.hang_timeout",
    "stragglers.slower_by": "stragglers.threshold",
    "anomalies.give_up_after": "anomalies.max_bad_steps",
    "data.schedule": "data.curriculum",
}
"""Old key -> new key, each `section.name`. Both are in the same section, and values keep their meaning."""

_LONGEST_SHOWN = 60


def refuse_renamed(raw: Mapping[str, Any]) -> None:
    """Refuses old keys, and old names among `run.allow_change`.

    Args:
        raw: a whole config as parsed JSON, overrides applied.

    Raises:
        ConfigError: names the first old key, its value, the new name and what to write.
    """
    for old, new in RENAMED.items():
        section, name = old.split(".")
        entries = raw.get(section)
        if isinstance(entries, Mapping) and name in entries:
            value = entries[name]
            raise ConfigError(old, value, why=f"renamed to {new}", remedy=_how_to_write(new, value))
    run = raw.get("run")
    allowed = run.get("allow_change") if isinstance(run, Mapping) else None
    for name in allowed if isinstance(allowed, list | tuple) else ():
        if isinstance(name, str) and name in RENAMED:
            raise ConfigError("run.allow_change", name, why=f"renamed to {RENAMED[name]}", remedy=f"{RENAMED[name]}")


def upgrade_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config, or the stored fields that decide a run's curve, under the keys of this version.

    Args:
        config: the `config` or `details["curve"]` of a manifest, old keys or new. It is not changed.

    Returns:
        A copy with every old key replaced by its new name; everything else as it is.
    """
    upgraded = dict(config)
    for old, new in RENAMED.items():
        section, name = old.split(".")
        entries = upgraded.get(section)
        if isinstance(entries, Mapping) and name in entries:
            later = new.split(".")[1]
            # in place of the old one: a printed config keeps its order
            upgraded[section] = {later if key == name else key: value for key, value in entries.items()}
    return upgraded


def _how_to_write(new: str, value: Any) -> str:
    section, name = new.split(".")
    shown = json.dumps(value)
    if len(shown) > _LONGEST_SHOWN:
        return f'write "{name}" in place of the old name in section "{section}"; the value stays as it is'
    return f'write "{section}": {{"{name}": {shown}}}, or --set {new}={shown if not isinstance(value, str) else value}'
