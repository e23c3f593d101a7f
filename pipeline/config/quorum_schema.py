"""What the sections `islands` and `replicas` share: how groups of processes of one run find and trust each other."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat

from headrace.base.section import Count, Section


class QuorumSection(Section):
    """Groups of processes, each a run of its own, that meet at a lighthouse and may leave and join at any time."""

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
    secret_file: str | None = Field(
        None, description="File with the secret that all groups share, 16 bytes or more, e.g. /run/secrets/islands"
    )
    timeout_s: PositiveFloat = Field(
        60.0, description="Seconds without progress after which an exchange with the other groups has failed, e.g. 60"
    )
    wait_s: PositiveFloat = Field(
        600.0,
        description="Seconds that an exchange waits for a living group that is slower, e.g. 600; it is left behind"
        " then, where more than half of the living ones are there. A setting of the lighthouse that the command starts",
    )
    start_s: NonNegativeFloat = Field(
        60.0, description="Seconds that the start waits for all `count` groups, e.g. 60; 0 starts alone"
    )
