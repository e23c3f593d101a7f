"""What an exchange between islands costs over links with latency: the mechanism, counted, and nothing fitted.

All round trips are two latencies of the slowest link. `pipeline.run.groups.islands` makes, one after the other:

- the quorum: a connection to the lighthouse and a request on it;
- where islands have come, left or failed since the last exchange, or that is long ago, a new process group: the store
  of torch and the connections of gloo, in 7 + 4 (m - 1) round trips of m islands with a secret (counted between network
  namespaces: 11, 15, 19 and 35 round trips of 2, 3, 4 and 8 islands);
- an all-to-all, then an all-gather: gloo sends a message when it knows that the other side receives, one round trip
  until the last byte of an empty one. Each island sends (m - 1) / m of its bytes in either.

The connections are new or have been idle, so that the all-to-all begins with TCP's slow start (RFC 6928: ten segments,
twice as many in every round trip) until the round trip is filled; the all-gather finds them open. Linux begins afresh
after an idle time (RFC 2861) with cubic, not with BBR, for which this is too long by some round trips in a kept group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.plan.predict.links import Link

QUORUM_ROUND_TRIPS = 2
_FORM_ROUND_TRIPS, _PEER_ROUND_TRIPS = 7, 4
_FIRST_WINDOW = 10 * 1448
"""Bytes that a new TCP connection sends before it hears from the other side: ten segments of Ethernet's size."""


@dataclass(frozen=True)
class Island:
    """One island.

    Attributes:
        step_s: seconds of a local step, with the communication within the island.
        link: to the other islands, one direction; of all ranks of the island together.
    """

    step_s: float
    link: Link


@dataclass(frozen=True)
class Exchange:
    """What islands send each other.

    Attributes:
        steps: local steps between two exchanges of the same parameter, H.
        bytes: of what one island contributes to an exchange of all parameters, as it is sent.
        collective: all_reduce (an island means a part of all and sends it to all, compressed or not:
            `pipeline.run.groups.islands.mean`), all_gather (every island gets all contributions), or none:
            asynchronous, by the first island's site.
        fragments: parts of the parameters, exchanged one after another within H steps.
        delay: steps that an island goes on beside an exchange; at most steps / fragments.
        state_bytes: that a late comer loads: weights and the outer optimizer's state.
        compute_s: seconds of an exchange of all parameters that are an island's own arithmetic: pseudo-gradient,
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
    """Seconds in which `count` islands agree on an exchange and connect, or find that they are connected: `kept`."""
    forming = 0 if kept else _FORM_ROUND_TRIPS + _PEER_ROUND_TRIPS * (count - 1)
    return 2 * latency_s * (QUORUM_ROUND_TRIPS + forming)


def new_connections_s(size: float, link: Link, *, connections: int = 1) -> float:
    """Seconds until `size` bytes have left on each of some new TCP connections that share a link.

    Args:
        size: bytes of each connection.
        link: that they share, one direction.
        connections: at the same time.
    """
    round_trip, bandwidth = 2 * link.latency_s, link.bandwidth / connections
    full = bandwidth * round_trip
    if full <= _FIRST_WINDOW:
        return size / bandwidth
    # after k round trips w (2^k - 1) bytes have left, w the first window
    most = math.log2(full / _FIRST_WINDOW)
    needed = math.log2(size / _FIRST_WINDOW + 1)
    if needed <= most:
        return round_trip * needed
    return round_trip * most + (size - _FIRST_WINDOW * (2**most - 1)) / bandwidth


def exchange_s(islands: Sequence[Island], exchange: Exchange, *, kept: bool = False) -> float:
    """Seconds of one exchange, of one fragment. All send at the same time, so that the slowest link counts.

    Args:
        islands: that take part.
        exchange: of which one fragment is sent; its collective is all_reduce or all_gather.
        kept: whether they have the process group of the exchange before.
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
    """Seconds of a step of plain data parallelism over the same links: a ring all-reduce of gradients in every step.

    Its connections stay open. Each of m islands sends 2 (m - 1) messages in an all-reduce, one after the other, each
    when it knows that the other side receives: a round trip.

    Args:
        islands: whose slowest member every step waits for.
        gradient_bytes: of all gradients.
        overlap: share of a step beside which gradients are reduced: the backward pass.
        all_reduces: of a step, one after the other: buckets of gradients, and the numbers that ranks agree on.
    """
    slowest, m = max(island.step_s for island in islands), len(islands)
    links = [island.link for island in islands]
    message_s = max(2 * all_reduces * link.latency_s + gradient_bytes / m / link.bandwidth for link in links)
    return slowest + max(0.0, 2 * (m - 1) * message_s - overlap * slowest)
