"""Errors of a replica that cannot go on with the others: the reason and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import ConfigError, LostError
from pipeline.run.groups.replicas.deal import ReplicaMember


def other_curve(me: ReplicaMember, members: Sequence[ReplicaMember]) -> ConfigError:
    """The error of a replica that would make other updates than the others."""
    others = ", ".join(each.name for each in members)
    why = f"{others} train another curve than {me.name}, or split the model over their ranks in another way"
    remedy = (
        "the same config, engine, ZeRO stage, parallel and anomalies sections, number of processes, kind of device and"
        " version of torch on all"
    )
    return ConfigError("replicas", why=why, remedy=remedy)


def no_exchange(me: ReplicaMember, why: str, *, attempts: int, others: str) -> LostError:
    """The error of a replica whose attempts to exchange have all failed."""
    return LostError(
        f"step {me.step + 1}: {attempts} exchanges of {me.name} have failed one after another; the others: {others}\n"
        f"  why: {why}\n  try: give every replica a name of its own and a replicas.bind that the others reach, let them"
        f" connect to it on all ports, and start it again"
    )


def left_behind(me: ReplicaMember, source: ReplicaMember) -> LostError:
    """The error of a replica whose weights differ from the others'."""
    where, again = f"step {me.step + 1}", "start it again: it takes their state"
    if me.commit == source.commit:
        return LostError(
            f"{where}: {me.name} and {source.name} have made the same exchanges and have come to other losses or"
            f" gradient norms: their weights differ\n  try: {again}; the same devices and drivers on all replicas"
        )
    return LostError(
        f"{where}: the other replicas went on without {me.name} for more than one step\n"
        f"  try: {again}; a larger replicas.wait_s if it is only slower"
    )


def ahead(me: ReplicaMember, source: ReplicaMember) -> ConfigError:
    """The error of a replica whose checkpoint is of a later step than the running replicas are at."""
    why = f"{me.name} has a checkpoint of step {me.step}, and the replicas that run are at step {source.step}"
    remedy = (
        f"to go on from step {me.step}, stop the others and start all together, with a replicas.start_s in which the"
        f" slowest has loaded its checkpoint; or remove the checkpoints of {me.name}, and it joins the others"
    )
    return ConfigError("replicas", why=why, remedy=remedy)
