"""Communication of sharded layers beside their computation: what compute does not hide, by a small event simulation.

One stream computes, one communicates, each in order, as with FSDP2 and DeepSpeed's ZeRO-3 on a GPU. In the forward pass
weights of layer i + k are gathered while layer i computes (k: prefetch). In the backward pass layers come in the
reverse order; weights are gathered again where they were freed, and gradients of a layer are reduce-scattered once they
are computed. The gather of a layer may begin when the layer k visits before it begins to compute.

FSDP2 puts reduce-scatters on a stream of their own; they share the network with gathers, so that one queue is what they
have together, with gathers first where both could begin.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Seconds of one layer and micro-batch on one rank.

    Attributes:
        forward_s, backward_s: computation.
        gather_s: all-gather of its weights; 0 where they are whole.
        reduce_s: reduce-scatter of its gradients; 0 where they are not reduced after this micro-batch.
    """

    forward_s: float
    backward_s: float
    gather_s: float
    reduce_s: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward pass.

    Attributes:
        seconds: from the first gather to the last reduction.
        compute_s: of them, computation.
        communication_s: of all gathers and reductions, hidden or not.
    """

    seconds: float
    compute_s: float
    communication_s: float

    @property
    def exposed_s(self) -> float:
        """Seconds in which nothing computes: communication that computation does not hide."""
        return self.seconds - self.compute_s


@dataclass(frozen=True, slots=True)
class _Work:
    """A layer's visit: gather, compute, reduce."""

    gather_s: float
    compute_s: float
    reduce_s: float


def overlapped(layers: Sequence[LayerCosts], *, prefetch: int = 1, regather: bool = True) -> Overlap:
    """Simulates the passes of one micro-batch.

    Args:
        layers: in the order of the forward pass.
        prefetch: layers whose weights are gathered ahead of the one that computes; 0: none, every gather is exposed.
        regather: weights are freed after the forward pass and gathered again for the backward pass (ZeRO-3, FSDP2's
            reshard_after_forward); else only once. The last layer's stay, as FSDP2 keeps them.
    """
    assert layers
    assert prefetch >= 0
    forward = [_Work(layer.gather_s, layer.forward_s, 0.0) for layer in layers]
    kept = len(layers) - 1
    backward = [
        _Work(layer.gather_s if regather and i != kept else 0.0, layer.backward_s, layer.reduce_s)
        for i, layer in reversed(list(enumerate(layers)))
    ]
    work = forward + backward
    seconds = _simulate(work, prefetch)
    communication = sum(each.gather_s + each.reduce_s for each in work)
    return Overlap(seconds, sum(each.compute_s for each in work), communication)


def _simulate(work: Sequence[_Work], prefetch: int) -> float:
    """When the last computation and reduction of a row of visits are over."""
    compute_end = network_end = 0.0
    starts: list[float] = []
    pending: deque[tuple[float, float]] = deque()
    for i, each in enumerate(work):
        allowed = compute_end if prefetch == 0 else starts[i - prefetch] if i >= prefetch else 0.0
        gathered = 0.0
        if each.gather_s:
            network_end = _reduce(pending, network_end, before=allowed)
            gathered = network_end = max(network_end, allowed) + each.gather_s
        starts.append(max(compute_end, gathered))
        compute_end = starts[i] + each.compute_s
        if each.reduce_s:
            pending.append((compute_end, each.reduce_s))
    return max(compute_end, _reduce(pending, network_end, before=math.inf))


def _reduce(pending: deque[tuple[float, float]], network_end: float, *, before: float) -> float:
    """Runs the reductions (when they are ready, seconds) that begin before a gather may; when the network is free."""
    while pending and max(pending[0][0], network_end) < before:
        ready, seconds = pending.popleft()
        network_end = max(network_end, ready) + seconds
    return network_end
