"""Parallelism topology: global rank <-> mesh coordinates (pp, dp, cp, tp). Pure integers, no torch.

Ranks are laid out with tp varying fastest, then cp, dp, pp: the ranks of one tensor-parallel group are neighbors and
share a node's fast links, and pipeline stages, which communicate least, lie furthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("pp", "dp", "cp", "tp")
"""Mesh axes from slowest to fastest varying."""


@dataclass(frozen=True)
class Topology:
    """Sizes of the mesh axes. Their product is the number of ranks."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        assert all(size >= 1 for size in self.sizes), self

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(pp, dp, cp, tp)."""
        return (self.pp, self.dp, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a global rank on every axis, e.g. {"pp": 0, "dp": 1, "cp": 0, "tp": 0}."""
        assert 0 <= rank < self.world_size, (rank, self)
        coordinates: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, coordinates[axis] = divmod(rank, size)
        return coordinates

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The global rank at the given coordinates; the inverse of `coordinates`."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def group(self, rank: int, axis: str) -> list[int]:
        """The global ranks that differ from `rank` only along `axis`, in order; `rank` is one of them."""
        own = self.coordinates(rank)
        return [self.rank(**{**own, axis: i}) for i in range(self.sizes[AXES.index(axis)])]

    def __str__(self) -> str:
        return (
            " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1) or "1 process"
        )
