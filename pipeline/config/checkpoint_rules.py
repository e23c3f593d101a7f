"""Rules on when a run is checkpointed."""

from __future__ import annotations

from headrace.base.errors import ConfigError
from pipeline.config.sections.run import RunSection


def check_checkpoints(section: RunSection) -> None:
    """Checks what belongs to `run.checkpoint_every` "auto", and what contradicts it.

    Raises:
        ConfigError: a key has no meaning beside it, or without it.
    """
    auto = section.checkpoint_every == "auto"
    if section.node_mtbf_hours is not None and not auto:
        why = "only run.checkpoint_every auto decides by it"
        remedy = 'set run.checkpoint_every to "auto", or remove it'
        raise ConfigError("run.node_mtbf_hours", section.node_mtbf_hours, why=why, remedy=remedy)
    if section.keep_every is not None and auto:
        why = "checkpoints by time are of any steps, seldom of its multiples"
        remedy = "remove it, or set run.checkpoint_every to a number that divides it"
        raise ConfigError("run.keep_every", section.keep_every, why=why, remedy=remedy)
