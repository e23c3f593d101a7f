"""Pairs the nodes that measure their link: each is in one pair at a time and starts half of its pairs."""

from __future__ import annotations

from collections.abc import Sequence


def rounds(nodes: Sequence[str], *, most: int) -> list[list[tuple[str, str]]]:
    """Round-robin tournament by the circle method: each round pairs every node with another one, none twice.

    Args:
        nodes: names of all nodes.
        most: largest number of rounds; n - 1 (n even) or n (n odd) have all pairs.

    Returns:
        Pairs of each round: (the one that starts the measurement, the other).
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
    """The nodes whose link with `node` is measured by `node` itself, in order."""
    return [other for pairs in rounds(nodes, most=most) for starter, other in pairs if starter == node]
