"""Bandwidth of collectives and of every pair of ranks, against the link's rate; names the slow pair.

The rate of a collective is its bus bandwidth: bytes / seconds, times 2 (n - 1) / n for an all-reduce of n ranks and
(n - 1) / n for the others, so that all compare with a link's rate. Source: NVIDIA nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.doctor.check import Context, Finding
from headrace.doctor.checks.shared import device_here, gathered, judged, machine_here, rendezvous_here
from pipeline.plan.calibration.measure import seconds_of
from pipeline.runtime.launch.rendezvous import Rendezvous

_BYTES = {"cuda": 1 << 28, "cpu": 1 << 20}
"""Bytes of a collective and of a message: on a GPU as many as the largest size of `headrace plan --calibrate`."""
_REPEATS, _MESSAGES = 7, {"cuda": 5, "cpu": 30}
LEAST_SHARE = 0.5
"""Share of the planner's low rate (link rate times `efficiency.links`) under which a link counts as slow."""
SLOW = 3.0
"""Without a known rate: a pair is slow if it is this many times slower than the median pair. Between four processes on
two busy cores (load 33) the slowest of 12 directions was at most 2.05 times slower, in 12 trials."""


def run(context: Context) -> Iterable[Finding]:
    """Runs the check; rank 0 reports."""
    if dist.get_world_size() == 1:
        yield Finding(None, "There is one rank, and no link to measure.")
        return
    device, rendezvous, hosts = device_here(), rendezvous_here(context), gathered(os.uname().nodename)
    rates = {f"{name}_gb_per_s": round(value / 1e9, 3) for name, value in _collectives(device)}
    wrong = [rank for rank, right in enumerate(gathered(_uneven_is_right(device))) if not right]
    pairs = {pair: rate for found in gathered(list(_pairs(device))) for pair, rate in found}
    if dist.get_rank() == 0:
        text = f"An all-to-all with uneven parts gave {rendezvous.describe(wrong) or 'no rank'} wrong values."
        meaning = "expert parallelism would train on the rows of other tokens"
        yield judged(not wrong, text, meaning, "look for hardware that corrupts data, then for another NCCL")
        yield _judged(rates, _least(within=len(set(hosts)) == 1, pair=False))
        yield _slow_pairs(pairs, hosts, rendezvous)


def _least(*, within: bool, pair: bool) -> float | None:
    """The least bytes per second that a healthy link moves; None for an unknown machine."""
    if (machine := machine_here()) is None:
        return None
    link = machine.links.within if within else machine.links.between
    shared = machine.links.within_links if within and pair else 1
    return LEAST_SHARE * machine.efficiency.links[0] * link.bytes_per_s / shared


def _judged(rates: dict[str, float], least: float | None) -> Finding:
    shown = ", ".join(f"{name[:-9].replace('_', ' ')} {rate}" for name, rate in rates.items())
    text = f"Bus bandwidth in GB/s: {shown}"
    if least is None:
        return Finding(None, f"{text}; no rate of this machine is known to compare it with.", figures=rates)
    remedy = "see the pairs of ranks; nvidia-smi topo -m, NCCL_DEBUG=INFO, and the network's cards and cables"
    text, meaning = f"{text} (least {least / 1e9:.3g}).", "a step would take longer than `headrace plan` predicts"
    return judged(min(rates.values()) >= least / 1e9, text, meaning, remedy, rates)


def _slow_pairs(rates: dict[tuple[int, int], float], hosts: list[str], rendezvous: Rendezvous) -> Finding:
    def shown(pair: tuple[int, int]) -> str:
        return rendezvous.describe(pair).replace(", ", " to ")

    def is_slow(pair: tuple[int, int]) -> bool:
        return rates[pair] < (_least(within=hosts[pair[0]] == hosts[pair[1]], pair=True) or median / SLOW)

    median, order = statistics.median(rates.values()), sorted(rates, key=lambda pair: rates[pair])
    slow = list(filter(is_slow, order))
    figures = {"median_gb_per_s": round(median / 1e9, 3), "least_gb_per_s": round(rates[order[0]] / 1e9, 3)}
    named = "; ".join(f"{shown(pair)}: {rates[pair] / 1e9:.3g} GB/s" for pair in slow[:4] or order[:1])
    text = f"{len(rates)} directions between pairs of ranks move {median / 1e9:.3g} GB/s (median), {len(slow)} are slow"
    meaning = "every collective over this pair is as slow as the pair, on all ranks"
    remedy = "check cards, cables and ports between these hosts (ibstat, ethtool, nvidia-smi nvlink -s)"
    return judged(not slow, f"{text}; the slowest: {named}.", meaning, remedy, figures, shown(order[0]))


def _collectives(device: torch.device) -> Iterator[tuple[str, float]]:
    """Yields the bus bandwidth of every collective, in bytes per second. Collective."""
    n, rank = dist.get_world_size(), dist.get_rank()
    part = torch.zeros(_BYTES[device.type] // 4 // n, device=device)
    whole = torch.zeros(part.numel() * n, device=device)
    splits = _splits(n, rank, unit=part.numel())
    sent, received = (torch.zeros(sum(splits), device=device) for _ in range(2))
    share, uneven = (n - 1) / n * whole.nbytes, 4.0 * (sum(splits) - splits[rank])
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "all_reduce": (partial(dist.all_reduce, whole), 2 * share),
        "all_gather": (partial(dist.all_gather_into_tensor, whole, part), share),
        "reduce_scatter": (partial(dist.reduce_scatter_tensor, part, whole), share),
        "uneven_all_to_all": (partial(dist.all_to_all_single, received, sent, splits, splits), uneven),
    }
    for name, (call, size) in calls.items():
        yield name, size / seconds_of(call, device, repeats=_REPEATS, least_s=0.0)[1]


def _splits(n: int, rank: int, *, unit: int) -> list[int]:
    """Elements that a rank sends to each other rank, and receives from it: uneven, and the same both ways."""
    return [unit * 2 * (1 + (rank + other) % n) // (n + 1) for other in range(n)]


def _uneven_is_right(device: torch.device) -> bool:
    """Whether each part of an uneven all-to-all comes from its rank. Collective."""
    n, rank = dist.get_world_size(), dist.get_rank()
    splits = _splits(n, rank, unit=97 * (n + 1))
    sent, received = torch.full((sum(splits),), float(rank), device=device), torch.empty(sum(splits), device=device)
    dist.all_to_all_single(received, sent, splits, splits)
    return all(bool((part == source).all()) for source, part in enumerate(received.split(splits)))


def _pairs(device: torch.device) -> Iterator[tuple[tuple[int, int], float]]:
    """Yields (sender, receiver) and bytes per second of the messages that this rank receives. Collective.

    In a round-robin tournament each rank meets every other. The pairs of a round are measured at the same time on GPUs,
    which have a link each, and one after another on a CPU, whose ranks share cores.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    payload, go = torch.zeros(_BYTES[device.type] // 4, device=device), torch.zeros(1, device=device)
    seats = [*range(n), *([-1] if n % 2 else [])]
    for _ in range(len(seats) - 1):
        meeting = list(zip(seats, reversed(seats), strict=True))  # each pair in one direction, then in the other
        together = len(seats) // 2 if device.type == "cuda" else 1
        for first in range(0, len(meeting), together):
            dist.barrier()
            for sender, receiver in meeting[first : first + together]:
                if rank in (sender, receiver) and -1 not in (sender, receiver):
                    best = min(_message(sender, receiver, payload, go) for _ in range(_MESSAGES[device.type]))
                    if rank == receiver:
                        yield (sender, receiver), payload.nbytes / best
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _message(sender: int, receiver: int, payload: Tensor, go: Tensor) -> float:
    """Sends a message once its receiver is ready; returns the seconds from then to its arrival at the receiver."""
    started = time.perf_counter()
    if dist.get_rank() == receiver:
        dist.send(go, sender)
        dist.recv(payload, sender)
    else:
        dist.recv(go, receiver)
        dist.send(payload, receiver)
    if payload.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started
