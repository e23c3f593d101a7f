"""Schemas of the sections `islands` and `replicas`: groups of processes of one run that leave and join."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from foundation.paths import LocalPath
from foundation.section import Count, Section


class QuorumSection(Section):
    """Groups of processes, each a run of its own, that form quorums at a lighthouse, and may leave and join."""

    count: Count = Field(
        2, description="Groups expected at the start and started by the command, e.g. 4; they may leave and join"
    )
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="Name of this group, unique among them, e.g. site-a; the command sets it. Without a name the run is"
        " an ordinary one",
    )
    lighthouse: str = Field(
        "127.0.0.1:29510",
        description="HOST:PORT of torchft's lighthouse, which knows the living groups, e.g. 10.0.0.1:29510",
    )
    bind: str = Field(
        "127.0.0.1",
        description="Address of this host on which the other groups connect, e.g. 10.0.0.2; another one than a loopback"
        " address needs secret_file",
    )
    secret_file: LocalPath | None = Field(
        None, description="File with the secret that all groups share, 16 bytes or more, e.g. /run/secrets/islands"
    )
    timeout_s: PositiveFloat = Field(
        60.0, description="Seconds without progress after which an exchange with the other groups has failed, e.g. 60"
    )
    wait_s: PositiveFloat = Field(
        600.0,
        description="Seconds that an exchange waits for a slower living group, e.g. 600, once more than half of"
        " the living groups are ready; then it goes on without that group. A setting of the command's lighthouse",
    )
    start_s: NonNegativeFloat = Field(
        60.0, description="Seconds that the start waits for all `count` groups, e.g. 60; 0 starts alone"
    )


class OuterSection(Section):
    """The outer optimizer: SGD on the mean pseudo-gradient of the islands."""

    lr: PositiveFloat = Field(0.7, description="Learning rate of the outer SGD, e.g. 0.7, as in the DiLoCo paper")
    momentum: NonNegativeFloat = Field(
        0.9, lt=1.0, description="Nesterov momentum of the outer SGD, e.g. 0.9; 0: plain SGD"
    )
    momentum_follows_lr: bool = Field(
        False,
        description="true: the momentum shrinks with the inner learning rate. For schedules that decay within a few"
        " tens of exchanges: momentum from earlier rounds with larger steps would overshoot",
    )


class IslandsSection(QuorumSection):
    """Low-communication training (DiLoCo): islands train alone, and exchange pseudo-gradients every `steps` steps."""

    steps: Count = Field(100, description="Inner steps between two exchanges (H), e.g. 100")
    overlap: NonNegativeInt = Field(
        0,
        description="Inner steps of a round that are trained beside its exchange, e.g. 10; less than steps. 0: the"
        " exchange waits",
    )
    mode: Literal["synchronous", "asynchronous"] = Field(
        "synchronous",
        description="synchronous: all islands exchange together; asynchronous: none waits for another, and stale"
        " pseudo-gradients count less. Then run.steps counts the steps of all islands together",
    )
    outer: OuterSection = OuterSection()
    compress: Literal["none", "int8"] = Field(
        "none",
        description="Compression of the exchange: none (fp32), or int8 with a scale per block of 256 values and error"
        " feedback",
    )


class ReplicasSection(QuorumSection):
    """Replicas of the model that divide every step's batch and sum their gradients; they may leave and join."""
