"""Simulates a step of a pipeline: every rank executes its program, and waits for messages of the others.

A message starts once its sender has sent it and its receiver has asked for it (rendezvous, as in NCCL and gloo), and
takes a given time. A pass begins when the rank is free and its input has arrived. Under NCCL a rank's messages in one
process group pass one after another, in the order of the program; the next one waits. Where ranks have several stages,
each link to a neighbour is a group (`Mesh.link_groups`); else all links are one group. Not simulated: messages of
several groups that share a cable, collectives within a stage, the host's own time between two passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.config.topology import link_of
from pipeline.plan.predict.passes import RECEIVES, SENDS, Instruction, PassKind, Program


class PassTimes(Protocol):
    """Times of a virtual stage's passes."""

    def seconds(self, instruction: Instruction) -> float:
        """Seconds of a pass."""
        ...


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch in a virtual stage.

    Attributes:
        forward_s: forward pass.
        input_backward_s: gradients of the inputs, including the second forward pass of activation checkpointing.
        weight_backward_s: gradients of the weights. A schedule that does not split the backward pass takes both
            together.
    """

    forward_s: float
    input_backward_s: float
    weight_backward_s: float = 0.0

    def seconds(self, instruction: Instruction) -> float:
        """Seconds of a pass. torch runs stage 0's backward pass with the weights: its inputs need no gradient."""
        backward = self.input_backward_s + self.weight_backward_s
        first = instruction.stage == 0
        return {
            PassKind.FORWARD: self.forward_s,
            PassKind.BACKWARD: backward,
            PassKind.INPUT_BACKWARD: 0.0 if first else self.input_backward_s,
            PassKind.WEIGHT_BACKWARD: backward if first else self.weight_backward_s,
        }[instruction.kind]


@dataclass(frozen=True, slots=True)
class TimedPass:
    """A pass with its time.

    Attributes:
        rank: pipeline rank.
        instruction: pass that is computed.
        start_s, end_s: seconds since the step began.
    """

    rank: int
    instruction: Instruction
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline.

    Attributes:
        ranks: number of pipeline ranks.
        passes: passes of all ranks, each rank's in order.
    """

    ranks: int
    passes: tuple[TimedPass, ...]

    @property
    def seconds(self) -> float:
        """Seconds of all passes of the step, without the reduction of gradients and the update."""
        return max(each.end_s for each in self.passes)

    def idle_s(self, rank: int) -> float:
        """Seconds of the step in which a rank computes nothing."""
        return self.seconds - sum(each.end_s - each.start_s for each in self.passes if each.rank == rank)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they compute nothing."""
        return sum(self.idle_s(rank) for rank in range(self.ranks)) / (self.ranks * self.seconds)

    def peak_in_flight(self, rank: int) -> int:
        """Most micro-batches whose activations a rank holds at once, counted for each virtual stage separately.

        A micro-batch counts from the beginning of its forward pass to the end of its backward pass; where that is
        split, to the end of the pass for the weights.
        """
        held, peak = 0, 0
        own = [each.instruction.kind for each in self.passes if each.rank == rank]
        for kind in own:
            held += kind is PassKind.FORWARD
            peak = max(peak, held)
            held -= kind in (PassKind.BACKWARD, PassKind.WEIGHT_BACKWARD)
        return peak


def simulate_pipeline(
    program: Program, times: Sequence[PassTimes], *, transfers: Sequence[float], in_order: bool = False
) -> Timeline:
    """Simulates one step.

    Args:
        program: program of the schedule.
        times: pass times of every virtual stage.
        transfers: seconds of a micro-batch's hidden states from each virtual stage to the next; gradients take as long
            on the way back.
        in_order: whether messages of a rank in one group pass one after another (NCCL).
    """
    assert len(times) == program.stages == len(transfers) + 1
    # a rank that waits for its sends has no message queued behind one
    mail = _Mail(transfers, program, in_order and not program.waits_for_sends)
    ranks = [_Rank(rank, program, times, mail) for rank in range(len(program.ranks))]
    while not all(rank.finished for rank in ranks):
        # each rank runs until it waits for another; ranks have their own clocks: their order here does not matter
        advanced = [rank.advance() for rank in ranks]
        assert any(advanced), f"deadlock: {[str(rank.next) for rank in ranks if not rank.finished]}"
    return Timeline(len(ranks), tuple(each for rank in ranks for each in rank.passes))


_Message = tuple[bool, int, int]
"""A message: whether it goes forward, the receiving stage, the micro-batch."""


@dataclass
class _Mail:
    """Messages between stages, and when they have been received.

    Attributes:
        arrivals: message -> time in seconds at which it arrives, once it was sent, was asked for, and had its turn on
            both ranks.
    """

    transfers: Sequence[float]
    program: Program
    in_order: bool
    arrivals: dict[_Message, float] = field(default_factory=dict)
    _sides: dict[_Message, list[tuple[Hashable, float]]] = field(default_factory=dict)
    _streams: dict[Hashable, deque[_Message]] = field(default_factory=dict)
    _free: dict[Hashable, float] = field(default_factory=dict)

    def post(self, rank: int, message: _Message, now: float) -> None:
        """Queues a send, or the matching receive, in its stream, which transfers one message at a time."""
        stream = self._stream(rank, message)
        self._sides.setdefault(message, []).append((stream, now))
        self._streams.setdefault(stream, deque()).append(message)
        heads = [message]
        while heads:
            first = heads.pop()
            sides = self._sides[first]
            has_turn = first not in self.arrivals and all(self._streams[each][0] == first for each, _ in sides)
            if len(sides) < 2 or not has_turn:
                continue
            forward, stage, _ = first
            start = max(max(asked, self._free.get(each, 0.0)) for each, asked in sides)
            self.arrivals[first] = start + self.transfers[stage - 1 if forward else stage]
            for each, _ in sides:
                self._free[each] = self.arrivals[first]
                self._streams[each].popleft()
                heads += list(self._streams[each])[:1]

    def _stream(self, rank: int, message: _Message) -> Hashable:
        """The stream in which a message waits on a rank; each message has its own where messages may overtake."""
        if not self.in_order:
            return rank, message
        forward, stage, _ = message
        ranks, ends = len(self.program.ranks), (stage - 1 if forward else stage + 1, stage)
        several = self.program.stages > ranks
        return rank, link_of(*map(self.program.rank_of, ends), pp=ranks) if several else 0


@dataclass
class _Rank:
    """A rank, its clock, and its position in its program."""

    rank: int
    program: Program
    times: Sequence[PassTimes]
    mail: _Mail
    now: float = 0.0
    position: int = 0
    unfinished_sends: list[_Message] = field(default_factory=list)
    passes: list[TimedPass] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.position == len(self.program.ranks[self.rank])

    @property
    def next(self) -> Instruction:
        return self.program.ranks[self.rank][self.position]

    def advance(self) -> bool:
        """Executes instructions until one has to wait for another rank; returns whether any was executed."""
        before = self.position
        while not self.finished and self._execute(self.next):
            self.position += 1
        return self.position > before

    def _execute(self, instruction: Instruction) -> bool:
        stage, micro_batch = instruction.stage, instruction.micro_batch
        if instruction.kind in SENDS:
            forward = instruction.kind is PassKind.SEND_FORWARD
            message = (forward, stage + 1 if forward else stage - 1, micro_batch)
            self.mail.post(self.rank, message, self.now)
            self.unfinished_sends.append(message)
            return True
        if instruction.kind in RECEIVES:
            self.mail.post(self.rank, (instruction.kind is PassKind.RECEIVE_FORWARD, stage, micro_batch), self.now)
            return True
        needed = [self._input(instruction)] + (self.unfinished_sends if self.program.waits_for_sends else [])
        arrivals = [self.mail.arrivals.get(message) for message in needed if message is not None]
        known = [arrival for arrival in arrivals if arrival is not None]
        if len(known) < len(arrivals):
            return False
        start = max([self.now, *known])
        self.now = start + self.times[stage].seconds(instruction)
        self.passes.append(TimedPass(self.rank, instruction, start, self.now))
        self.unfinished_sends.clear()
        return True

    def _input(self, instruction: Instruction) -> _Message | None:
        """The message that a pass needs; None where the rank makes the input itself."""
        forward, stage = instruction.kind is PassKind.FORWARD, instruction.stage
        source = stage - 1 if forward else stage + 1
        own = instruction.kind is PassKind.WEIGHT_BACKWARD or not 0 <= source < self.program.stages
        if own or self.program.rank_of(source) == self.rank:
            return None
        return forward, stage, instruction.micro_batch
