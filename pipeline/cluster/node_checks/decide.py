"""Decides which pairs of nodes measure links and, from all records, which nodes are bad. No processes, no clocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from pipeline.cluster.node_checks.records import NodeLink, NodeRecord
from pipeline.config.sections.node_checks import NodeChecksSection

QUICK = "both are quick with others"
"""End of a warning about a link that may be noise."""
VERDICT = "verdict.json"
"""Name of the file with the verdict, in the shared directory."""
_NOISE = 0.4
"""Share of the least bandwidth required of a node, below which a single link is reported. One link varies more than a
node's fastest link: among 66 links between 12 processes on 2 cores the slowest had 30 % of the median."""
_SHOWN = 8
_FEW = 3
"""Smallest number of nodes among which the common node of slow links can be identified."""


@dataclass(frozen=True)
class NodesVerdict:
    """The verdict of the checks on all nodes.

    Attributes:
        bad: node -> its problems, in words.
        common: problems that every node has: no node is to blame.
        warnings: problems that cannot be blamed on one node.
    """

    bad: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    common: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """Formats the verdict for people."""
        named = [f"bad node {node}: {'; '.join(why)}" for node, why in self.bad.items()]
        return (
            *named,
            *(f"every node: {text}" for text in self.common),
            *(f"warning: {text}" for text in self.warnings),
        )


def decide(nodes: Sequence[str], records: Mapping[str, NodeRecord], *, terms: NodeChecksSection) -> NodesVerdict:
    """Decides which nodes are bad.

    Args:
        nodes: names of all nodes, in order.
        records: node -> its record, for nodes that have written one.
        terms: thresholds.
    """
    bad: dict[str, list[str]] = defaultdict(list)
    finished = {node: records[node] for node in nodes if node in records and records[node].finished}
    common, warnings = list(_local(finished, bad)), list(_devices(finished, bad))
    if 2 * len(finished) < len(nodes):
        silent = ", ".join(node for node in nodes if node not in finished)
        warnings.append(f"no more than {len(finished)} of {len(nodes)} nodes have finished: {silent} have not")
    else:
        for node in nodes:
            if node not in finished:
                bad[node].append(_silence(records.get(node), terms.timeout))
    links = _links(finished)
    warnings += chain(_parts(links), _speeds(links, bad, terms), _clocks(links, bad, terms))
    return NodesVerdict({node: tuple(bad[node]) for node in nodes if bad[node]}, tuple(common), tuple(warnings))


def _local(finished: Mapping[str, NodeRecord], bad: dict[str, list[str]]) -> Iterator[str]:
    """Adds to `bad` the problems that nodes found on themselves; yields problems that every node has."""
    for check in dict.fromkeys(chain.from_iterable(record.problems for record in finished.values())):
        having = {node: record.problems[check] for node, record in finished.items() if check in record.problems}
        if len(having) == len(finished) > 1:
            yield next(iter(having.values()))
            continue
        for node, text in having.items():
            bad[node].append(text)


def _devices(finished: Mapping[str, NodeRecord], bad: dict[str, list[str]]) -> Iterator[str]:
    """Adds to `bad` the nodes with fewer accelerators than most; yields a warning where there is no usual number."""
    counts = {node: record.devices for node, record in finished.items() if record.devices is not None}
    if len(set(counts.values())) < 2:
        return
    numbers = list(counts.values())
    usual = max(sorted(set(numbers), reverse=True), key=numbers.count)
    if 2 * numbers.count(usual) <= len(numbers):
        yield "the nodes have different numbers of devices: " + ", ".join(f"{n} {count}" for n, count in counts.items())
        return
    for node, count in counts.items():
        if count < usual:
            bad[node].append(f"it has {count} devices, the others {usual}")


def _silence(record: NodeRecord | None, timeout_s: float) -> str:
    if record is None:
        return (
            f"no sign of it within {timeout_s:g} s: its checks did not start, or cannot write into the shared directory"
        )
    return f"it did not finish its checks within {timeout_s:g} s; the last thing it did: {record.stage}"


def _links(finished: Mapping[str, NodeRecord]) -> dict[str, list[NodeLink]]:
    """Returns node -> its links, including those that the other node measured."""
    links: dict[str, list[NodeLink]] = {node: [] for node in finished}
    for node, record in finished.items():
        for link in record.links:
            links[node].append(link)
            if link.other in links:
                clock = None if link.clock_s is None else -link.clock_s
                links[link.other].append(NodeLink(node, link.mb_s, clock, link.round_trip_ms, link.error))
    return links


def _parts(links: Mapping[str, Sequence[NodeLink]]) -> Iterator[str]:
    """Yields the groups into which the network is partitioned; which group is to blame is unknown."""
    cut = {node: each for node, each in links.items() if any(link.error for link in each)}
    parts = {frozenset((node, *(link.other for link in each if not link.error))) for node, each in cut.items()}
    groups = [part for part in parts if len(part) > 1]
    if len(groups) > 1 and sum(map(len, groups)) == len(frozenset().union(*groups)):  # no node is in two groups
        named = " and ".join(sorted(", ".join(sorted(part)) for part in groups))
        yield f"the network has parted: {named} exchange data only among themselves; no start works until it has healed"


def _speeds(
    links: Mapping[str, Sequence[NodeLink]], bad: dict[str, list[str]], terms: NodeChecksSection
) -> Iterator[str]:
    """Adds to `bad` nodes without any fast link; yields the slow links of nodes that have fast ones."""
    best = {node: max((link.mb_s or 0.0 for link in each), default=None) for node, each in links.items()}
    known = sorted(speed for speed in best.values() if speed is not None)
    usual = known[len(known) // 2] if known else 0.0  # the upper median: a slow node slows only its own links
    least = max(terms.slow_link * usual, terms.min_bandwidth or 0.0)
    slow = {node for node, speed in best.items() if speed is not None and speed < least}
    if len(known) < _FEW:
        pairs = {frozenset((node, link.other)): link for node, each in links.items() for link in each}
        for pair, link in pairs.items():
            if link.error or (link.mb_s or 0.0) < least:
                ends = " and ".join(sorted(pair))
                yield f"the link of {ends}: {_speed(link)}; which of the two is to blame is unknown"
        return
    if len(slow) == len(known):
        yield f"no node has a link of {least:,.0f} MB/s; the median node's fastest has {usual:,.0f}"
        return
    for node in slow:
        bad[node].append(_slow(links[node], best[node] or 0.0, usual))
    yield from _slow_links({node: each for node, each in links.items() if node not in slow}, _NOISE * least)


def _slow_links(links: Mapping[str, Sequence[NodeLink]], least: float) -> Iterator[str]:
    """Yields links between good nodes that failed or are very slow."""
    found = [
        f"the link of {node} and {link.other}: {_speed(link)}, and {QUICK}"
        for node, each in links.items()
        for link in each
        if node < link.other and link.other in links and (link.error or (link.mb_s or 0.0) < least)
    ]
    yield from found[:_SHOWN]
    if len(found) > _SHOWN:
        yield f"{len(found) - _SHOWN} more links like these"


def _slow(links: Sequence[NodeLink], best: float, usual: float) -> str:
    if not best:
        error = next((link.error for link in links if link.error), "no answer")
        return f"no other node can exchange data with it ({error})"
    return f"its fastest link of {len(links)} has {best:,.0f} MB/s, the median node's {usual:,.0f}"


def _speed(link: NodeLink) -> str:
    return link.error or f"{link.mb_s or 0.0:,.0f} MB/s"


def _clocks(
    links: Mapping[str, Sequence[NodeLink]], bad: dict[str, list[str]], terms: NodeChecksSection
) -> Iterator[str]:
    """Adds to `bad` the nodes whose clock differs from every other's; yields a warning where all differ."""
    nearest: dict[str, float] = {}
    for node, each in links.items():
        offsets = [link.clock_s for link in each if link.clock_s is not None]
        if offsets:
            nearest[node] = min(offsets, key=abs)
    off = {node: offset for node, offset in nearest.items() if abs(offset) > terms.max_clock_skew}
    if off and len(off) == len(nearest):
        yield "the nodes' clocks differ: " + ", ".join(f"{node} by {abs(each):.1f} s" for node, each in off.items())
        return
    for node, offset in off.items():
        bad[node].append(f"its clock is {abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'} the others'")


def rounds(nodes: Sequence[str], *, most: int) -> list[list[tuple[str, str]]]:
    """Pairs all nodes by the circle method of round-robin tournaments: every pair meets once, a node once per round.

    Args:
        nodes: names of all nodes.
        most: largest number of rounds; n - 1 rounds (n even) or n rounds (n odd) have all pairs.

    Returns:
        Pairs of each round: (node that starts the measurement, other node).
    """
    players: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    found = []
    for number in range(min(most, len(players) - 1)):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        turned = number % 2 == 1
        found.append([(b, a) if turned else (a, b) for a, b in pairs if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return found


def partners_of(node: str, nodes: Sequence[str], *, most: int) -> list[str]:
    """Returns the nodes to which `node` itself measures the link, in order."""
    return [other for pairs in rounds(nodes, most=most) for starter, other in pairs if starter == node]
