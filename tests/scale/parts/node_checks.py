"""Node checks before a start: a host's partners for links, and the verdict on all hosts by their records."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.cluster.node_checks.__main__ import NodeChecks
from pipeline.cluster.node_checks.decide import partners_of
from pipeline.cluster.node_checks.records import NodeLink, NodeRecord, write_record
from pipeline.config.sections.node_checks import NodeChecksSection
from tests.scale.measuring import Figures, Part, measured

_SLOW = "node0003"


def verdict(hosts: int, work: Path) -> Figures:
    """A host chooses its partners, reads what all hosts have written and decides; one host is slow."""
    terms, nodes = NodeChecksSection(), [f"node{number:04}" for number in range(hosts)]
    speeds = {node: 100.0 if node == _SLOW else 1000.0 for node in nodes}
    for node in nodes:
        others = partners_of(node, nodes, most=terms.partners)
        links = tuple(NodeLink(each, min(speeds[node], speeds[each]), 0.0, 0.1) for each in others)
        write_record(work, NodeRecord(node, "1", node, 29600, "finished", 8, links=links))
    checks = NodeChecks(nodes[0], dict.fromkeys(nodes, "127.0.0.1"), work, work, "1", terms, 8)
    with measured() as figures:
        partners_of(nodes[0], nodes, most=terms.partners)
        found = checks._verdict(time.monotonic() + 600)
    assert list(found.bad) == [_SLOW]
    return figures


PARTS = [
    Part(
        "node checks: verdict",
        "a host chooses its partners, reads the records of all hosts once they have finished, and decides. Until then"
        " it polls the unfinished hosts, less often the more hosts there are.",
        "hosts",
        (125, 250, 500, 1000),
        1000,
        verdict,
    )
]
