"""Whole matrices from whatever shards ranks hold, each computed once, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoint.format.shards import NamedShard
from pipeline.engines.optim import matrix_exchange
from pipeline.engines.optim.matrix_exchange import HeldShard, MatrixExchange
from pipeline.engines.optim.newton_schulz import flops
from pipeline.models.construction.rectangle import Rectangle
from pipeline.models.hidden_matrices import MatrixForm
from tests.engines.optim.test_muon import FORMS, values
from tests.engines.parallel.ranks import WORLD, Ranks

LAYOUTS = ("rows", "flat", "replicated", "columns and rows", "experts")


def held(layout: str, rank: int) -> list[list[HeldShard[MatrixForm]]]:
    """What a rank has of every tensor: boxes and flat ranges as the layouts have them, some of them empty."""
    if layout == "flat":  # ZeRO 1 and 2: all parameters one after the other, in equal parts
        return [list(flat_partition(rank))]
    return [[each] if each.length else [] for name in FORMS for each in [shard(name, layout, rank)]]


def flat_partition(rank: int) -> Any:
    total = sum(math.prod(form.shape) for form in FORMS.values())
    size, at = -(-total // WORLD), 0
    for name, form in FORMS.items():
        count = math.prod(form.shape)
        first, last = max(at, rank * size), min(at + count, (rank + 1) * size)
        if first < last:
            yield HeldShard(name, form, None, first - at, first - rank * size, last - first)
        at += count


def shard(name: str, layout: str, rank: int) -> HeldShard[MatrixForm]:
    form = FORMS[name]
    first, rows, *others = form.shape if layout == "experts" and len(form.shape) == 3 else (0, *form.shape)
    if layout == "replicated":
        return HeldShard(name, form, None, 0, 0, math.prod(form.shape))
    if layout == "columns and rows":  # tp 2 of the last dim, then two ranks that share the rows of the box
        half = form.shape[-1] // 2
        size = half if rank < 2 else form.shape[-1] - half
        box = Rectangle((*(0,) * (len(form.shape) - 1), half * (rank >= 2)), (*form.shape[:-1], size))
        row = math.prod(box.sizes[1:])
        top = -(-box.sizes[0] // 2)
        return HeldShard(name, form, box, row * top * (rank % 2), 0, row * (box.sizes[0] - top if rank % 2 else top))
    if layout == "experts" and first:  # two ranks have the same experts
        box = Rectangle(
            (first // 2 * (rank % 2), 0, 0), (first - first // 2 if rank % 2 else first // 2, rows, *others)
        )
        return HeldShard(name, form, box, 0, 0, box.numel)
    size = -(-form.shape[0] // WORLD)
    begin, end = (min(form.shape[0], size * each) for each in (rank, rank + 1))
    row = math.prod(form.shape[1:])
    return HeldShard(name, form, None, begin * row, 0, (end - begin) * row)


def change(stored: list[tuple[MatrixForm, Tensor]]) -> None:
    """Depends on the whole matrix."""
    for _, matrix in stored:
        matrix.mul_(1 + matrix.sum())


def exchanged(rank: int, layout: str, elements: int) -> dict[str, Any]:
    matrix_exchange._ELEMENTS_AT_ONCE = elements
    own = held(layout, rank)
    exchange = MatrixExchange(own, dist.group.WORLD, flops=lambda form: sum(flops(*each) for each in form.matrices))
    full, tensors = values(0), {}
    for index, shards in enumerate(own):
        tensors[index] = torch.zeros(sum(each.length for each in shards))
        for each in shards:
            fill(each, tensors[index], full[each.name])
    exchange.apply(tensors, change)
    parts = [(each.name, parts_of(each, tensors[i])) for i, shards in enumerate(own) for each in shards]
    return {"parts": parts, "shares": exchange.shares(range(len(own)))}


def parts_of(each: HeldShard[MatrixForm], tensor: Tensor) -> dict[tuple[int, ...], Tensor]:
    flat = tensor.narrow(0, each.offset, each.length)
    return NamedShard(each.form.shape, start=each.start, values=flat, box=each.box).parts


def fill(each: HeldShard[MatrixForm], tensor: Tensor, full: Tensor) -> None:
    for at, part in parts_of(each, tensor).items():
        part.copy_(full[tuple(slice(o, o + s) for o, s in zip(at, part.shape, strict=True))])


@pytest.mark.parametrize("elements", [1 << 27, 100], ids=["at once", "in several rounds"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_matrices_are_changed_whatever_the_ranks_hold(ranks: Ranks, layout: str, elements: int) -> None:
    found: Sequence[dict[str, Any]] = ranks.run(exchanged, layout, elements)
    expected = values(0)
    for full in expected.values():
        full.mul_(1 + full.sum(dim=(-2, -1), keepdim=True))
    covered = {name: torch.zeros(form.shape) for name, form in FORMS.items()}
    for each in found:
        for name, parts in each["parts"]:
            for at, part in parts.items():
                where = tuple(slice(o, o + s) for o, s in zip(at, part.shape, strict=True))
                assert torch.allclose(part, expected[name][where], atol=1e-5), name
                covered[name][where] = 1
    assert all(each.all() for each in covered.values())
    shares = found[0]["shares"]
    assert all(each["shares"] == shares for each in found)  # the same plan on all ranks
    total = sum(form.stacked * sum(flops(*each) for each in form.matrices) for form in FORMS.values())
    assert sum(shares) == total  # every matrix once
    assert max(shares) <= 2 * total / WORLD
