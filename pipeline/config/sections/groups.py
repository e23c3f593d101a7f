"""Schema of the section `islands`: low-communication training (DiLoCo) across groups of processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from headrace.base.section import Count, Section
from pipeline.config.quorum_schema import QuorumSection


class OuterSection(Section):
    """The outer optimizer: SGD on the mean pseudo-gradient of the islands."""

    lr: PositiveFloat = Field(0.7, description="Learning rate of the outer SGD, e.g. 0.7, as in the DiLoCo paper")
    momentum: NonNegativeFloat = Field(
        0.9, lt=1.0, description="Nesterov momentum of the outer SGD, e.g. 0.9; 0: plain SGD"
    )
    momentum_follows_lr: bool = Field(
        False,
        description="true: the momentum shrinks with the inner learning rate. For schedules that fall within some tens"
        " of exchanges, where momentum of earlier rounds, of larger steps, would overshoot",
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
