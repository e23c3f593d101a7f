"""Instructions of each rank of a pipeline in a step, in order: passes over micro-batches, messages between stages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PassKind(StrEnum):
    """Kinds of instructions; the letters of passes are those of the zero-bubble paper (arXiv:2401.10241)."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_BACKWARD = "I"
    WEIGHT_BACKWARD = "W"
    SEND_FORWARD = "send F"
    RECEIVE_FORWARD = "receive F"
    SEND_BACKWARD = "send B"
    RECEIVE_BACKWARD = "receive B"


SENDS = frozenset({PassKind.SEND_FORWARD, PassKind.SEND_BACKWARD})
RECEIVES = frozenset({PassKind.RECEIVE_FORWARD, PassKind.RECEIVE_BACKWARD})


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a rank.

    Attributes:
        kind: kind of pass or message.
        stage: virtual stage, from 0, that computes, sends or receives.
        micro_batch: number of the micro-batch, from 0.
    """

    kind: PassKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of all ranks of a pipeline in a step.

    Attributes:
        ranks: instructions of every rank, in order.
        placed: pipeline rank of every virtual stage.
        waits_for_sends: whether a rank waits until its sends have been received before its next pass.
    """

    ranks: tuple[tuple[Instruction, ...], ...]
    placed: tuple[int, ...]
    waits_for_sends: bool

    def passes(self, rank: int) -> list[Instruction]:
        """A rank's passes in order, without messages."""
        return [each for each in self.ranks[rank] if each.kind not in SENDS | RECEIVES]

    @property
    def stages(self) -> int:
        """Number of virtual stages."""
        return len(self.placed)

    def rank_of(self, stage: int) -> int:
        """The rank that runs a virtual stage."""
        return self.placed[stage]
