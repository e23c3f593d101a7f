"""The programs of the pipeline schedules, taken from the libraries that run them, so that the two cannot differ.

torch's interleaved schedules are tables with sends and receives, which its runtime executes. Its GPipe and 1F1B are
loops: here they run over a stage that computes nothing and records its calls. (Their tables are not used: in torch 2.13
the table of 1F1B lacks the first micro-batch of the last stage.) DeepSpeed's 1F1B is a generator of instructions per
tick.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from foundation.log_filters import quiet_deepspeed
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.layout import SCHEDULES
from pipeline.plan.predict.passes import Instruction, PassKind, Program

_TORCH_KINDS = {
    "F": PassKind.FORWARD,
    "B": PassKind.BACKWARD,
    "I": PassKind.INPUT_BACKWARD,
    "W": PassKind.WEIGHT_BACKWARD,
    "SEND_F": PassKind.SEND_FORWARD,
    "RECV_F": PassKind.RECEIVE_FORWARD,
    "SEND_B": PassKind.SEND_BACKWARD,
    "RECV_B": PassKind.RECEIVE_BACKWARD,
}
_DEEPSPEED_KINDS = {
    "ForwardPass": PassKind.FORWARD,
    "BackwardPass": PassKind.BACKWARD,
    "SendActivation": PassKind.SEND_FORWARD,
    "RecvActivation": PassKind.RECEIVE_FORWARD,
    "SendGrad": PassKind.SEND_BACKWARD,
    "RecvGrad": PassKind.RECEIVE_BACKWARD,
}


def program_of(run: ResolvedRun) -> Program:
    """The program of a resolved run that has 2 or more pipeline ranks."""
    return make_program(
        run.config.engine,
        run.config.parallel.schedule,
        ranks=run.topology.pp,
        micro_batches=run.batch.accumulation,
        virtual_stages=run.virtual_stages,
    )


@functools.cache
def make_program(engine: str, schedule: str, *, ranks: int, micro_batches: int, virtual_stages: int = 1) -> Program:
    """Makes the program that an engine executes in a step. Needs no process group.

    Args:
        engine: "torch" or "deepspeed", as in the config.
        schedule: name of the schedule, as in `parallel.schedule`; DeepSpeed has "1f1b" only.
        ranks: number of pipeline ranks (pp), 2 or more.
        micro_batches: number of micro-batches in a step, which `pipeline.config.rules.layout.check_schedule` has
            allowed.
        virtual_stages: number of virtual stages per rank.
    """
    if engine == "deepspeed":
        assert (schedule, virtual_stages) == ("1f1b", 1), "checked with the config"
        lists = [tuple(_deepspeed(rank, ranks, micro_batches)) for rank in range(ranks)]
        return Program(tuple(lists), tuple(range(ranks)), waits_for_sends=True)
    from torch.distributed.pipelining import schedules  # noqa: PLC0415  imports torch

    ours = SCHEDULES[schedule]
    kind = getattr(schedules, ours.torch)
    if issubclass(kind, schedules.PipelineScheduleSingle):
        noted = [_run_loop(kind, rank, ranks, micro_batches) for rank in range(ranks)]
        # 1F1B joins each send with the next receive, and waits for both; GPipe waits for its sends at the end
        return Program(tuple(noted), tuple(range(ranks)), waits_for_sends=schedule == "1f1b")
    placed = tuple(ours.rank_of(stage, ranks) for stage in range(ranks * virtual_stages))
    own = [_RecordedStage(index, len(placed), ranks, rank=rank) for index, rank in enumerate(placed) if rank == 0]
    table = kind(own, micro_batches, loss_fn=_no_loss, scale_grads=False).pipeline_order_with_comms
    return Program(tuple(tuple(_of_table(table[rank])) for rank in range(ranks)), placed, waits_for_sends=False)


def _of_table(actions: list[Any]) -> Iterator[Instruction]:
    """Instructions of a rank's actions: both of a pair, without sharding of weights and reduction of gradients."""
    for action in (part for whole in actions for part in whole.sub_actions or (whole,)):
        kind = _TORCH_KINDS.get(action.computation_type.value)
        if kind is not None:
            yield Instruction(kind, action.stage_index, action.microbatch_index)


def _run_loop(kind: Any, rank: int, ranks: int, micro_batches: int) -> tuple[Instruction, ...]:
    """Runs a schedule's loop over a stage that only records its calls."""
    stage = _RecordedStage(rank, ranks, ranks, rank=rank)
    schedule = kind(stage, micro_batches, scale_grads=False)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches, [None] * micro_batches)
    return tuple(stage.noted)


def _no_loss(*_: Any) -> None:
    raise AssertionError("nothing is computed")


class _RecordedStage:
    """A stage for torch's schedules that records their calls, and computes and sends nothing."""

    submod = None
    has_backward = True

    def __init__(self, index: int, stages: int, ranks: int, *, rank: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, rank
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.noted: list[Instruction] = []

    def _note(self, kind: PassKind, micro_batch: int) -> list[Any]:
        self.noted.append(Instruction(kind, self.stage_index, micro_batch))
        return []

    def get_fwd_recv_ops(self, index: int) -> list[Any]:
        return [] if self.is_first else self._note(PassKind.RECEIVE_FORWARD, index)

    def get_fwd_send_ops(self, index: int) -> list[Any]:
        return [] if self.is_last else self._note(PassKind.SEND_FORWARD, index)

    def get_bwd_recv_ops(self, index: int) -> list[Any]:
        return [] if self.is_last else self._note(PassKind.RECEIVE_BACKWARD, index)

    def get_bwd_send_ops(self, index: int) -> list[Any]:
        return [] if self.is_first else self._note(PassKind.SEND_BACKWARD, index)

    def forward_one_chunk(self, index: int, *_: Any, **__: Any) -> None:
        self._note(PassKind.FORWARD, index)

    def backward_one_chunk(self, index: int, **_: Any) -> None:
        self._note(PassKind.BACKWARD, index)

    def perform_reduce_grad(self, *_: Any) -> None:
        """Does nothing: the reduction follows the passes."""


def _deepspeed(rank: int, ranks: int, micro_batches: int) -> Iterator[Instruction]:
    """The commands of DeepSpeed's TrainSchedule; each kind takes the micro-batches in order."""
    quiet_deepspeed()  # a plan prints JSON to the same output
    from deepspeed.runtime.pipe.schedule import TrainSchedule  # noqa: PLC0415  imports torch

    done: Counter[PassKind] = Counter()
    for commands in TrainSchedule(micro_batches, ranks, rank).steps():
        for command in commands:
            kind = _DEEPSPEED_KINDS.get(command.name)
            if kind is not None:
                yield Instruction(kind, rank, done[kind])
                done[kind] += 1
