"""The outer state of a rank: weights as of the last exchange, momentum and error feedback, flat on the CPU in fp32.

Shapes: N, the elements of all shards of weights that the rank has, in the order of its state.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from pipeline.checkpoint.format.shard_table import State, all_parts, encode_table, parts_of, table_of
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.named_state import OUTER_STATES, weight_key
from pipeline.config.schedule import Schedule
from pipeline.config.sections.groups import OuterSection
from pipeline.run.groups.islands.ledger import Deal


def weight_shards(state: State) -> dict[str, NamedShard | Tensor]:
    """Returns the weights of a state, by Hugging Face name."""
    prefix = weight_key("")
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def gather(state: State) -> Tensor:
    """Copies the weights of a state to the CPU: fp32 [N]."""
    parts = all_parts(weight_shards(state))
    flat = [part.detach().reshape(-1).to("cpu", torch.float32) for part in parts]
    return torch.cat(flat) if flat else torch.empty(0)


@torch.no_grad()
def scatter(flat: Tensor, state: State) -> None:
    """Writes weights, fp32 [N], into a state in place."""
    parts = all_parts(weight_shards(state))
    for part, values in zip(parts, flat.split([each.numel() for each in parts]), strict=True):
        part.detach().copy_(values.view(part.shape))


def layout_digest(state: State) -> str:
    """Computes a digest of a rank's shards (names, shapes, offsets): ranks that exchange must have equal shards."""
    table = encode_table(table_of(weight_shards(state)))
    return hashlib.sha256(json.dumps([each.hex() for each in table.digests]).encode()).hexdigest()[:16]


def learning_rate_ratio(schedule: Schedule, ended: Deal, *, steps: int, overlap: int = 0) -> float:
    """Computes the ratio of a pseudo-gradient's summed inner learning rates to the previous one's, at most 1.

    A pseudo-gradient is a sum of steps, whose sizes are proportional to their learning rates. With this factor momentum
    is a sum of directions, like that of an SGD with a falling learning rate (torch's SGD multiplies by it after
    momentum).

    Args:
        schedule: schedule of the inner learning rate.
        ended: the round whose pseudo-gradient is meant; the last round of a run may be shorter.
        steps: number of inner steps of every full round.
        overlap: number of steps at the end of each round that count in the pseudo-gradient of the next round, not in
            its own; the last round of a run counts all of its steps.
    """
    begin = max(0, ended.step - overlap)
    now = sum(schedule.lr(step) for step in range(begin + 1, ended.snapshot_step + 1))
    before = sum(schedule.lr(step) for step in range(max(0, begin - steps) + 1, begin + 1))
    return min(1.0, now / before) if before else 1.0


class OuterState:
    """Outer weights and the outer optimizer: SGD with Nesterov momentum on the mean pseudo-gradient.

    Args:
        state: the engine's state, with the initial outer weights.
        section: the config's `islands.outer`.

    Attributes:
        weights: fp32 [N].
        momentum: fp32 [N].
        error: fp32 [N], accumulated compression error of this rank's pseudo-gradients.
    """

    def __init__(self, state: State, section: OuterSection) -> None:
        self._section = section
        self.weights = gather(state)
        self.momentum, self.error = torch.zeros_like(self.weights), torch.zeros_like(self.weights)

    def pseudo_gradient(self, inner: Tensor) -> Tensor:
        """Computes outer minus inner weights: fp32 [N] (Douillard et al. 2023, algorithm 1, line 11)."""
        return self.weights - inner

    def step(self, gradient: Tensor, *, kept: float = 1.0) -> None:
        """Makes a Nesterov step as torch's SGD: momentum = mu * momentum + g; weights -= lr * (g + mu * momentum).

        Args:
            gradient: fp32 [N], the mean pseudo-gradient; overwritten.
            kept: factor applied to the momentum first.
        """
        mu, lr = self._section.momentum, self._section.lr
        if mu:
            self.momentum.mul_(mu * kept).add_(gradient)
            gradient.add_(self.momentum, alpha=mu)
        self.weights.sub_(gradient, alpha=lr)

    def write(self, state: State, *, since: Tensor | None = None) -> None:
        """Writes the outer weights into a state of the engine.

        Args:
            state: the engine's state, changed in place.
            since: fp32 [N], the inner weights from which the pseudo-gradient was taken; training since then is kept:
                inner = outer + (inner - since). None for the outer weights alone.
        """
        scatter(self.weights if since is None else gather(state).sub_(since).add_(self.weights), state)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Returns the tensors for an island that joins late; without error feedback, which is specific to an island."""
        return self.weights, self.momentum

    def named(self, state: State) -> dict[str, NamedShard | Tensor]:
        """Returns the outer state as shards of a checkpoint, as views.

        Args:
            state: the engine's state, whose weight shards have the same layout.
        """
        shards = weight_shards(state)
        sizes = [sum(part.numel() for part in parts_of(value).values()) for value in shards.values()]
        named: dict[str, NamedShard | Tensor] = {}
        for key, flat in zip(OUTER_STATES, (self.weights, self.momentum, self.error), strict=True):
            for (name, like), values in zip(shards.items(), flat.split(sizes), strict=True):
                made = NamedShard.like(like, values) if isinstance(like, NamedShard) else values.view(like.shape)
                named[f"{key}/{name}"] = made
        return named
