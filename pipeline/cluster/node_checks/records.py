"""A node's findings about itself and its links: one JSON file per node in a shared directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foundation.directory import write_json


@dataclass(frozen=True)
class NodeLink:
    """A measured link from a node to another one.

    Attributes:
        other: the other node.
        mb_s: MB/s in the slower direction, from the better of two measurements; None where the link could not be
            measured.
        clock_s: the other node's clock minus this one's, in seconds.
        round_trip_ms: shortest round-trip time of a small message, in milliseconds.
        error: why the link could not be measured.
    """

    other: str
    mb_s: float | None = None
    clock_s: float | None = None
    round_trip_ms: float | None = None
    error: str = ""


@dataclass(frozen=True)
class NodeRecord:
    """Contents of a node's file.

    Attributes:
        node: name of the node.
        attempt: name that distinguishes these checks from earlier ones in the directory, whose records are ignored.
        host: host name.
        port: port on which the node answers others that measure their link to it.
        stage: name of the check being made, or another stage; "finished" at the end.
        devices: number of accelerators; None where that is unknown.
        problems: check -> the problem that it found.
        skipped: check -> why the node could not make it.
        facts: check -> its measurement.
        links: links to other nodes, measured by this node.
    """

    node: str
    attempt: str = ""
    host: str = ""
    port: int = 0
    stage: str = "starting"
    devices: int | None = None
    problems: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[NodeLink, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether the node has made all its checks."""
        return self.stage == "finished"


def write_record(directory: Path, record: NodeRecord) -> None:
    """Replaces the node's file."""
    write_json(directory / f"{record.node}.json", asdict(record))


def read_records(directory: Path, nodes: Iterable[str], *, attempt: str) -> dict[str, NodeRecord]:
    """Reads node -> its record, for nodes that have written one in this attempt."""
    found: dict[str, NodeRecord] = {}
    for node in nodes:
        try:
            raw = json.loads((directory / f"{node}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing so far, or on a file system that fails for a moment
            continue
        if raw.get("attempt") == attempt:
            found[node] = NodeRecord(**{**raw, "links": tuple(NodeLink(**link) for link in raw["links"])})
    return found
