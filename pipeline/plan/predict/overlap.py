"""Simulates how computation hides the communication of sharded layers; the rest is exposed.

One stream computes and one communicates, each in order, as with FSDP2 and DeepSpeed's ZeRO-3 on a GPU. In the forward
pass weights of layer i + k are gathered while layer i computes (k: prefetch). In the backward pass layers come in the
reverse order. Weights that were freed are gathered again, and a layer's gradients are reduce-scattered once they are
computed. A layer's gather may begin when the layer k visits before it begins to compute.

FSDP2 runs reduce-scatters on a stream of their own, which shares the network with the gathers. Both are simulated as
one queue, with gathers first where both could begin.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Seconds of one layer and micro-batch on one rank.

    Attributes:
        forward_s, backward_s: computation of the forward and of the backward pass.
        gather_s: all-gather of the layer's weights; 0 where they are not sharded.
        reduce_s: reduce-scatter of the layer's gradients; 0 where none follows this micro-batch.
    """

    forward_s: float
    backward_s: float
    gather_s: float
    reduce_s: float


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A layer's computation or communication.

    Attributes:
        kind: gather, forward, backward or reduce.
        layer: index of the layer in the order of the forward pass.
        start_s, end_s: seconds since the first event.
    """

    kind: str
    layer: int
    start_s: float
    end_s: float

    @property
    def computes(self) -> bool:
        """Whether the event is on the stream that computes."""
        return self.kind in ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Overlap:
    """The events of a forward and a backward pass.

    Attributes:
        events: events of both streams, each stream's in order.
    """

    events: tuple[StreamEvent, ...]

    @property
    def seconds(self) -> float:
        """Seconds from the first gather to the last reduction."""
        return max(each.end_s for each in self.events)

    @property
    def compute_s(self) -> float:
        """Seconds of computation."""
        return sum(each.end_s - each.start_s for each in self.events if each.computes)

    @property
    def communication_s(self) -> float:
        """Seconds of all gathers and reductions, hidden or not."""
        return sum(each.end_s - each.start_s for each in self.events if not each.computes)

    @property
    def exposed_s(self) -> float:
        """Seconds in which nothing computes: communication that is not hidden."""
        return max(0.0, self.seconds - self.compute_s)


@dataclass(frozen=True, slots=True)
class _Visit:
    """A layer's gather, computation and reduction."""

    layer: int
    kind: str
    gather_s: float
    compute_s: float
    reduce_s: float


def overlapped(
    layers: Sequence[LayerCosts], *, prefetch: int = 1, regather: bool = True, beside: bool = True
) -> Overlap:
    """Simulates the passes of one micro-batch.

    Args:
        layers: costs of the layers, in the order of the forward pass.
        prefetch: number of layers whose weights are gathered ahead of the computing layer; with 0 every gather is
            exposed.
        regather: whether weights are freed after the forward pass and gathered again for the backward pass (ZeRO-3,
            FSDP2's reshard_after_forward); else they are gathered once. The last layer's weights stay, as in FSDP2.
        beside: whether communication may run beside computation; else each waits for the other to end.
    """
    assert layers
    assert prefetch >= 0
    forward = [_Visit(i, "forward", layer.gather_s, layer.forward_s, 0.0) for i, layer in enumerate(layers)]
    kept = len(layers) - 1
    backward = [
        _Visit(i, "backward", layer.gather_s if regather and i != kept else 0.0, layer.backward_s, layer.reduce_s)
        for i, layer in reversed(list(enumerate(layers)))
    ]
    visits = forward + backward
    return Overlap(tuple(_simulate(visits, prefetch) if beside else _serial(visits)))


def _serial(visits: Sequence[_Visit]) -> Iterator[StreamEvent]:
    """Runs computation and communication one after the other."""
    now = 0.0
    for each in visits:
        for kind, seconds in (("gather", each.gather_s), (each.kind, each.compute_s), ("reduce", each.reduce_s)):
            if seconds or kind == each.kind:
                yield StreamEvent(kind, each.layer, now, now + seconds)
                now += seconds


def _simulate(visits: Sequence[_Visit], prefetch: int) -> Iterator[StreamEvent]:
    """Runs both streams at once."""
    network = _Network()
    compute_end = 0.0
    starts: list[float] = []
    for i, each in enumerate(visits):
        allowed = compute_end if prefetch == 0 else starts[i - prefetch] if i >= prefetch else 0.0
        gathered = 0.0
        if each.gather_s:
            yield from network.reduce(before=allowed)
            gather = network.run("gather", each.layer, ready=allowed, seconds=each.gather_s)
            yield gather
            gathered = gather.end_s
        starts.append(max(compute_end, gathered))
        compute_end = starts[i] + each.compute_s
        yield StreamEvent(each.kind, each.layer, starts[i], compute_end)
        if each.reduce_s:
            network.pending.append((compute_end, each.layer, each.reduce_s))
    yield from network.reduce(before=math.inf)


@dataclass
class _Network:
    """The stream that communicates: when it is free, and which reductions wait (ready, layer, seconds)."""

    end: float = 0.0
    pending: deque[tuple[float, int, float]] = field(default_factory=deque)

    def run(self, kind: str, layer: int, *, ready: float, seconds: float) -> StreamEvent:
        start = max(self.end, ready)
        self.end = start + seconds
        return StreamEvent(kind, layer, start, self.end)

    def reduce(self, *, before: float) -> Iterator[StreamEvent]:
        """Runs the reductions that can begin before the next gather."""
        while self.pending and max(self.pending[0][0], self.end) < before:
            ready, layer, seconds = self.pending.popleft()
            yield self.run("reduce", layer, ready=ready, seconds=seconds)
