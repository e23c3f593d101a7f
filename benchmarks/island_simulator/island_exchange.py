"""Costs of an exchange between islands over links with latency: computed from the protocol, without fitted parameters.

A round trip is two latencies of the slowest link. `pipeline.run.groups.islands` does the following in sequence:

- forms the quorum: a connection to the lighthouse and a request on it;
- makes a new process group, if islands have joined, left or failed since the last exchange, or it is long ago: torch's
  store and gloo's connections, in 7 + 4 (m - 1) round trips for m islands with a secret (counted between network
  namespaces: 11, 15, 19 and 35 round trips for 2, 3, 4 and 8 islands);
- runs an all-to-all, then an all-gather. gloo sends a message once it knows that the receiver is ready: an empty
  message takes one round trip. Each island sends (m - 1) / m of its bytes in either collective.

The connections are new or have been idle. So the all-to-all begins with TCP's slow start (RFC 6928: ten segments, twice
as many in every round trip) until the round trip is filled; for the all-gather they are open. After an idle time, Linux
starts slowly again (RFC 2861) with cubic, but not with BBR: with BBR the estimate for a kept group is too long by some
round trips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.plan.predict.links import Link

QUORUM_ROUND_TRIPS = 2
_FORM_ROUND_TRIPS, _PEER_ROUND_TRIPS = 7, 4
_FIRST_WINDOW = 10 * 1448
"""Bytes that a new TCP connection sends before the first acknowledgement: ten Ethernet-sized segments."""


@dataclass(frozen=True)
class Island:
    """One island.

    Attributes:
        step_s: seconds of a local step, including communication within the island.
        link: connection to the other islands, in one direction, for all ranks of the island together.
    """

    step_s: float
    link: Link


@dataclass(frozen=True)
class Exchange:
    """Data that islands send each other, and when.

    Attributes:
        steps: number of local steps between two exchanges of the same parameter, H.
        bytes: bytes that one island sends as its contribution to an exchange of all parameters.
        collective: all_reduce (each island averages a part and sends it to all, compressed or not:
            `pipeline.run.groups.islands.mean`), all_gather (every island gets all contributions), or none:
            asynchronous, through the first island's site.
        fragments: number of parts of the parameters, exchanged one after another within H steps.
        delay: number of steps that an island trains during an exchange; at most steps / fragments.
        state_bytes: bytes that a replica joining late loads: weights and the outer optimizer's state.
        compute_s: seconds of an island's own arithmetic in an exchange of all parameters: pseudo-gradient,
            quantization, mean, outer step.
    """

    steps: int
    bytes: float
    collective: str = "all_reduce"
    fragments: int = 1
    delay: int = 0
    state_bytes: float = 0.0
    compute_s: float = 0.0

    def __post_init__(self) -> None:
        if self.collective not in ("all_reduce", "all_gather", "none"):
            raise ValueError(f"there is no collective {self.collective!r}")
        if self.steps < 1 or self.fragments < 1 or self.steps % self.fragments:
            raise ValueError(f"{self.steps} steps are not divided into {self.fragments} fragments")
        if not 0 <= self.delay <= self.steps // self.fragments:
            raise ValueError(f"a delay of {self.delay} steps is longer than the {self.steps // self.fragments} between")


def form_s(count: int, latency_s: float, *, kept: bool = False) -> float:
    """Seconds in which `count` islands form a quorum and connect; `kept`: they find themselves still connected."""
    forming = 0 if kept else _FORM_ROUND_TRIPS + _PEER_ROUND_TRIPS * (count - 1)
    return 2 * latency_s * (QUORUM_ROUND_TRIPS + forming)


def new_connections_s(size: float, link: Link, *, connections: int = 1) -> float:
    """Seconds until `size` bytes have been sent on each of several new TCP connections that share a link.

    Args:
        size: bytes per connection.
        link: link that the connections share, in one direction.
        connections: number of simultaneous connections.
    """
    round_trip, bandwidth = 2 * link.latency_s, link.bandwidth / connections
    full = bandwidth * round_trip
    if full <= _FIRST_WINDOW:
        return size / bandwidth
    # after k round trips w (2^k - 1) bytes have been sent; w is the first window
    most = math.log2(full / _FIRST_WINDOW)
    needed = math.log2(size / _FIRST_WINDOW + 1)
    if needed <= most:
        return round_trip * needed
    return round_trip * most + (size - _FIRST_WINDOW * (2**most - 1)) / bandwidth


def exchange_s(islands: Sequence[Island], exchange: Exchange, *, kept: bool = False) -> float:
    """Seconds of one exchange of one fragment. All islands send at the same time: the slowest link counts.

    Args:
        islands: islands that take part.
        exchange: exchange whose fragment is sent; its collective is all_reduce or all_gather.
        kept: whether the islands still have the process group of the exchange before.
    """
    m, own = len(islands), exchange.compute_s / exchange.fragments
    if m < 2:
        return own
    size = exchange.bytes / exchange.fragments
    links = [island.link for island in islands]
    return own + max(
        form_s(m, link.latency_s, kept=kept) + _send_s(size, link, m, exchange.collective) for link in links
    )


def _send_s(size: float, link: Link, m: int, collective: str) -> float:
    each = size if collective == "all_gather" else size / m
    begins = 2 * link.latency_s + new_connections_s(each, link, connections=m - 1)
    return begins if collective == "all_gather" else begins + 2 * link.latency_s + (m - 1) * each / link.bandwidth


def bytes_sent(count: int, exchange: Exchange) -> float:
    """Bytes that one of `count` islands sends in an exchange of one fragment."""
    size = exchange.bytes / exchange.fragments
    if exchange.collective == "none":
        return size
    return size * (2 * (count - 1) / count if exchange.collective == "all_reduce" else count - 1)


def data_parallel_step_s(
    islands: Sequence[Island], gradient_bytes: float, *, overlap: float = 2 / 3, all_reduces: int = 1
) -> float:
    """Seconds of a plain data-parallel step over the same links, with a ring all-reduce of gradients in every step.

    The connections stay open. In an all-reduce each of m islands sends 2 (m - 1) messages in sequence, each once it
    knows that the receiver is ready: one round trip.

    Args:
        islands: islands; every step waits for the slowest.
        gradient_bytes: bytes of all gradients.
        overlap: share of a step during which gradients are reduced: the backward pass.
        all_reduces: number of sequential all-reduces in a step: buckets of gradients, and the numbers on which ranks
            agree.
    """
    slowest, m = max(island.step_s for island in islands), len(islands)
    links = [island.link for island in islands]
    message_s = max(2 * all_reduces * link.latency_s + gradient_bytes / m / link.bandwidth for link in links)
    return slowest + max(0.0, 2 * (m - 1) * message_s - overlap * slowest)
