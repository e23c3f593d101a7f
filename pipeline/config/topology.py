"""Parallelism topology: global rank <-> mesh coordinates (pp, dp, cp, tp). Pure integers, no torch.

Ranks are laid out with tp varying fastest, then cp, dp, pp: the ranks of one tensor-parallel group are neighbors and
share a node's fast links, and pipeline stages, which communicate least, lie furthest apart.

Expert parallelism uses the ranks of a pipeline stage (dp x cp x tp, which all see different tokens). On these ranks the
experts' mesh is (edp, ep), with ep varying fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("pp", "dp", "cp", "tp")
"""Mesh axes, from the slowest to the fastest varying."""


@dataclass(frozen=True)
class Topology:
    """Sizes of the mesh axes. The product of pp, dp, cp and tp is the number of ranks; ep divides dp x cp x tp."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        assert all(size >= 1 for size in (*self.sizes, self.ep)), self
        assert self.stage_ranks % self.ep == 0, self

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of the axes: (pp, dp, cp, tp)."""
        return (self.pp, self.dp, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Number of ranks of a pipeline stage that hold the same experts."""
        return self.stage_ranks // self.ep

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns a global rank's coordinate on every axis, e.g. {"pp": 0, "dp": 1, "cp": 0, "tp": 0}."""
        assert 0 <= rank < self.world_size, (rank, self)
        coordinates: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, coordinates[axis] = divmod(rank, size)
        return coordinates

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Returns the global rank at the given coordinates; the inverse of `coordinates`."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def group(self, rank: int, axis: str) -> list[int]:
        """Returns the global ranks that differ from `rank` only along `axis`, in order, including `rank`."""
        own = self.coordinates(rank)
        return [self.rank(**{**own, axis: i}) for i in range(self.sizes[AXES.index(axis)])]

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1)
        return (sizes or "1 process") + (f" (ep {self.ep})" if self.ep > 1 else "")


def largest_divisor(count: int, *, most: int) -> int:
    """Finds the largest divisor of a count up to `most`, at least 1: a valid value near an invalid one."""
    return max(n for n in range(1, min(most, count) + 1) if count % n == 0)


def link_of(one: int, other: int, *, pp: int) -> int:
    """Numbers the link between two neighbours in the ring of pipeline ranks: no rank has two links of one number.

    Numbers 0 and 1 alternate; with an odd number of ranks the link between the last and the first rank is 2.
    """
    low, high = sorted((one, other))
    if high - low == 1:
        return low % 2
    assert (low, high) == (0, pp - 1), (one, other, pp)
    return 1 + pp % 2


def sequence_chunks(length: int, *, cp: int, cp_rank: int, zigzag: bool) -> tuple[range, ...]:
    """Returns the positions of a sequence that a context-parallel rank holds, in order; every rank has equally many.

    Contiguous: rank r holds the r-th of cp chunks. Zigzag: it holds chunks r and 2 cp - 1 - r of 2 cp, which makes
    causal attention equal work on every rank (Llama 3, arXiv:2407.21783, section 3.3.2).

    Args:
        length: positions of the sequence; a multiple of cp, or of 2 cp with zigzag.
        cp: ranks that share a sequence.
        cp_rank: coordinate of the rank.
        zigzag: whether the layout is zigzag, as for ring attention.
    """
    zigzag = zigzag and cp > 1
    count = 2 * cp if zigzag else cp
    assert length % count == 0, (length, cp, zigzag)
    size = length // count
    chunks = (cp_rank, count - 1 - cp_rank) if zigzag else (cp_rank,)
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in chunks)
