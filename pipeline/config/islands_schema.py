"""Schema of the section `islands`: low-communication training (DiLoCo) across groups of processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from headrace.base.section import Count, Section


class OuterSection(Section):
    """The outer optimizer: SGD on the mean pseudo-gradient of the islands."""

    lr: PositiveFloat = Field(0.7, description="Learning rate of the outer SGD, e.g. 0.7, as in the DiLoCo paper")
    momentum: NonNegativeFloat = Field(
        0.9, lt=1.0, description="Nesterov momentum of the outer SGD, e.g. 0.9; 0: plain SGD"
    )


class IslandsSection(Section):
    """Low-communication training (DiLoCo): islands train alone, and exchange pseudo-gradients every `steps` steps."""

    count: Count = Field(
        2,
        description="Islands expected at the start, e.g. 4, and started by `headrace islands`; they may leave and join"
        " at any time",
    )
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
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="Name of this island, unique among them, e.g. site-a; `headrace train --island` sets it. Without a"
        " name the run is an ordinary one",
    )
    lighthouse: str = Field(
        "127.0.0.1:29510",
        description="HOST:PORT of torchft's lighthouse, which knows the living islands, e.g. 10.0.0.1:29510",
    )
    bind: str = Field(
        "127.0.0.1",
        description="Address of this host on which the other islands connect, e.g. 10.0.0.2; another one than a"
        " loopback address needs islands.secret_file",
    )
    secret_file: str | None = Field(
        None, description="File with the secret that all islands share, 16 bytes or more, e.g. /run/secrets/islands"
    )
    timeout_s: PositiveFloat = Field(
        60.0, description="Seconds without progress after which an exchange with the other islands has failed, e.g. 60"
    )
    wait_s: PositiveFloat = Field(
        600.0,
        description="Seconds that an exchange waits for a living island that is slower, e.g. 600; it is left behind"
        " then. A setting of the lighthouse that `headrace islands` starts",
    )
    start_s: NonNegativeFloat = Field(
        60.0, description="Seconds that the first round waits for all islands.count islands, e.g. 60; 0 starts alone"
    )
