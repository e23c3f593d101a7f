"""Islands: torchft's lighthouse as a process of the product, and the product's members of 64 islands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pipeline.config.sections.groups import IslandsSection
from pipeline.run.groups.islands.command import _start_lighthouse
from pipeline.run.groups.islands.ledger import Ledger, Member, decide
from pipeline.run.groups.islands.lighthouse import HEARTBEAT_S, LighthouseMember
from pipeline.runtime.launch.group import free_port
from tests.scale.measuring import Figures, Part, measured_process, resident_bytes

_SECRET = b"0123456789abcdef"
ABSENT = None if find_spec("torchft") else "torchft is not installed: pip install torchft"


@contextmanager
def _islands(count: int) -> Iterator[tuple[int, list[LighthouseMember[Member]]]]:
    """The lighthouse's process, and its members, which send heartbeats."""
    address = f"127.0.0.1:{free_port()}"
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_lighthouse, args=(address, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    assert ours.recv() == "begins"
    about: dict[str, Any] = {"store": "10.0.0.1:29500", "secret": _SECRET, "parse": Member.from_plain}
    members = [LighthouseMember(address, _named(number), **about) for number in range(count)]
    time.sleep(2 * HEARTBEAT_S)
    try:
        yield process.pid, members
    finally:
        for member in members:
            member.close()
        process.kill()


def _lighthouse(address: str, told: Any) -> None:
    server = _start_lighthouse(IslandsSection(lighthouse=address, wait_s=60.0), "islands")
    told.send("begins")
    time.sleep(600)
    server.shutdown()


def _named(number: int) -> str:
    return f"island-{number:03}"


def heartbeats(islands: int, work: Path) -> Figures:
    """A minute without a quorum; 20 s are measured."""
    del work
    with _islands(islands) as (pid, _), measured_process(pid, had=resident_bytes(pid)) as figures:
        time.sleep(20)
    figures.messages = 2 * islands * figures.seconds / HEARTBEAT_S
    return figures.times(60 / figures.seconds)


def quorum(islands: int, work: Path) -> Figures:
    """All islands ask for a quorum at the end of a round, forty times; of one."""
    del work
    rounds, names = 40, [_named(number) for number in range(islands)]
    fresh = [Member(name, Ledger(), 0, living=True, waited=False, layout="x") for name in names]
    begun = decide(fresh, steps=100, total=10**6, quorum=1)
    reports = [Member(name, begun.ledger, 100, living=True, waited=True, layout="x") for name in names]
    with _islands(islands) as (pid, members), measured_process(pid, had=resident_bytes(pid)) as figures:
        for _ in range(rounds):
            asked = [member.ask(report) for member, report in zip(members, reports, strict=True)]
            for future in asked:
                assert len(future.result(60).members) == islands
    figures.messages = 2 * islands * rounds
    return figures.times(1 / rounds)


PARTS = [
    Part(
        "islands: heartbeats",
        "torchft's lighthouse during a minute of training.",
        "islands",
        (8, 16, 32, 64),
        64,
        heartbeats,
        absent=ABSENT,
    ),
    Part(
        "islands: a quorum",
        "all islands ask the lighthouse for a quorum at the end of a round. Each answer has the reports of all islands,"
        " and each report the names of all islands.",
        "islands",
        (8, 16, 32, 64),
        64,
        quorum,
        absent=ABSENT,
    ),
]
