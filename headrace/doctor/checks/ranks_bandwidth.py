"""Bandwidth of collectives and of every pair of ranks, against the link's rate; names the slow pair.

The rate of a collective is its bus bandwidth: bytes / seconds, times 2 (n - 1) / n for an all-reduce of n ranks and
(n - 1) / n for the others, so that all compare with a link's rate. Source: NVIDIA nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.doctor.check import Context, Finding
from headrace.doctor.checks.rank_context import device_here, gathered, machine_here, rendezvous_here
from pipeline.plan.calibration.measure import seconds_of
from pipeline.runtime.machines.machine import Machine

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
    device = device_here()
    rendezvous = rendezvous_here(context)
    machine, hosts = machine_here(device), gathered(rendezvous.describe([dist.get_rank()]).rpartition(" on ")[2])
    busy = {name: round(value / 1e9, 3) for name, value in _collectives(device)}
    wrong = [rank for rank, right in enumerate(gathered(_uneven_is_right(device))) if not right]
    pairs = {pair: rate for found in gathered(list(_pairs(device))) for pair, rate in found}
    if dist.get_rank():
        return
    if wrong:
        yield Finding(
            False,
            f"An all-to-all with uneven parts gave {rendezvous.describe(wrong)} wrong values.",
            "expert parallelism would train on the rows of other tokens",
            "look for hardware that corrupts data, then for a fault of this version of the library",
        )
    yield _judged(busy, machine, within=len(set(hosts)) == 1)
    yield _slow_pairs(pairs, hosts, machine, describe=lambda pair: rendezvous.describe(pair).replace(", ", " to "))


def _expected(machine: Machine, *, within: bool, pair: bool) -> float:
    """The least bytes per second that a healthy link moves."""
    link = machine.links.within if within else machine.links.between
    shared = machine.links.within_links if within and pair else 1
    return LEAST_SHARE * machine.efficiency.links[0] * link.bytes_per_s / shared


def _judged(rates: dict[str, float], machine: Machine | None, *, within: bool) -> Finding:
    shown = ", ".join(f"{name.replace('_', ' ')} {rate:.3g}" for name, rate in rates.items())
    text, figures = f"Bus bandwidth in GB/s: {shown}", {f"{name}_gb_per_s": rate for name, rate in rates.items()}
    if machine is None:
        return Finding(None, f"{text}; no rate of this machine is known to compare it with.", figures=figures)
    least = _expected(machine, within=within, pair=False) / 1e9
    slow = [name for name, rate in rates.items() if rate < least]
    if not slow:
        return Finding(True, f"{text}; at least {least:.3g} were expected.", figures=figures)
    meaning = "every step would take longer than `headrace plan` predicts"
    remedy = "see the pairs below; nvidia-smi topo -m, NCCL_DEBUG=INFO, and the network's cards and cables"
    return Finding(False, f"{text}; {', '.join(slow)} is under {least:.3g}.", meaning, remedy, figures)


def _slow_pairs(
    rates: dict[tuple[int, int], float],
    hosts: list[str],
    machine: Machine | None,
    *,
    describe: Callable[[tuple[int, int]], str],
) -> Finding:
    median = statistics.median(rates.values())
    least = {
        pair: _expected(machine, within=hosts[pair[0]] == hosts[pair[1]], pair=True) if machine else median / SLOW
        for pair in rates
    }
    slow = sorted((pair for pair in rates if rates[pair] < least[pair]), key=lambda pair: rates[pair])
    slowest = min(rates, key=lambda pair: rates[pair])
    figures = {"pair_median_gb_per_s": round(median / 1e9, 3), "pair_least_gb_per_s": round(rates[slowest] / 1e9, 3)}
    text = f"{len(rates)} directions between pairs of ranks move {median / 1e9:.3g} GB/s (median), the slowest"
    text += f" {rates[slowest] / 1e9:.3g} ({describe(slowest)})"
    if not slow:
        return Finding(True, f"{text}.", figures=figures)
    worst = "; ".join(f"{describe(pair)}: {rates[pair] / 1e9:.3g} GB/s" for pair in slow[:4])
    return Finding(
        False,
        f"{text}; {len(slow)} are slow: {worst}.",
        "every collective over this pair is as slow as the pair, on all ranks",
        "check cards, cables and ports between these hosts (ibstat, ethtool, nvidia-smi nvlink -s); start without it",
        figures,
        where=describe(slow[0]),
    )


def _collectives(device: torch.device) -> Iterator[tuple[str, float]]:
    """Yields the bus bandwidth of every collective, in bytes per second. Collective."""
    n, rank = dist.get_world_size(), dist.get_rank()
    part = torch.zeros(_BYTES[device.type] // 4 // n, device=device)
    whole = torch.zeros(part.numel() * n, device=device)
    splits = _splits(n, rank, unit=part.numel())
    sent, received = (torch.zeros(sum(splits), device=device) for _ in range(2))
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "all_reduce": (partial(dist.all_reduce, whole), 2 * (n - 1) / n * whole.nbytes),
        "all_gather": (partial(dist.all_gather_into_tensor, whole, part), (n - 1) / n * whole.nbytes),
        "reduce_scatter": (partial(dist.reduce_scatter_tensor, part, whole), (n - 1) / n * whole.nbytes),
        "uneven_all_to_all": (
            partial(dist.all_to_all_single, received, sent, splits, splits),
            4.0 * (sum(splits) - splits[rank]),
        ),
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
