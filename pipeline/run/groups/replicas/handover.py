"""The state that a late comer takes from a living replica: weights, optimizer, counters of steps and data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from pipeline.checkpoint.format.shard_table import all_parts
from pipeline.data.skips import Skips
from pipeline.engines.base import Engine
from pipeline.run.anomalies.guarded_step import GuardedStepper
from pipeline.run.groups.islands.peers import Peers, unpack
from pipeline.run.groups.replicas import messages
from pipeline.run.groups.replicas.deal import ReplicaMember


def digest(stepper: GuardedStepper) -> str:
    """Digest of the last losses, gradient norms and skipped data, which differs where replicas have diverged."""
    text = json.dumps([stepper.state_dict(), stepper.skips.plain()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def send_state(
    peers: Peers, member: ReplicaMember, engine: Engine, stepper: GuardedStepper, *, to: Sequence[int]
) -> None:
    """Sends the state of this rank to the same ranks of late comers.

    Args:
        peers: the process group.
        member: this replica's report.
        engine: has weights and optimizer states.
        stepper: has the statistics of loss spikes, and the skips.
        to: ranks in the process group.

    Raises:
        ExchangeError: one does not answer.
    """
    header = {
        **{key: getattr(member, key) for key in ("step", "exchanges", "commit")},
        "anomalies": stepper.state_dict(),
        "skips": stepper.skips.plain(),
    }
    with engine.edit_state() as state:
        messages.send(peers, header, all_parts(state), to=to)


def take_state(
    header: dict[str, Any], packed: Tensor, member: ReplicaMember, engine: Engine, stepper: GuardedStepper
) -> ReplicaMember:
    """Takes the state that `send_state` has sent.

    Args:
        header, packed: the received message (see `messages.receive`).
        member: this replica's report.
        engine, stepper: engine and stepper of this rank, which take the state.

    Returns:
        Where it stands now. It does not have the result of the last exchange.
    """
    with engine.edit_state() as state:
        unpack(packed, all_parts(state))
    stepper.load_state_dict(header["anomalies"])
    stepper.skips = Skips.of(header["skips"])
    place = {key: header[key] for key in ("step", "exchanges", "commit")}
    return replace(member, **place, before=None, state=digest(stepper))
