"""Pipeline schedules of torch.distributed.pipelining over decoder stages: GPipe, 1F1B, interleaved 1F1B, zero bubble,
DualPipeV.

Stages send hidden states, and with some architectures more (`stage_messages`), but not labels, positions or documents:
every rank of a pipeline loads the same micro-batches. Virtual stage i of the model is on pipeline rank i % pp. In
DualPipeV, the second half of the stages is on the ranks in reverse order: the last stage is on the first rank, and the
two middle stages are on the last rank.

DualPipeV runs pairs of passes: the forward pass of a micro-batch in one stage of a rank, and the backward pass of
another micro-batch in the rank's other stage. With `parallel.ep_overlap` the two take turns at expert exchanges.

With ZeRO stages 0 to 2, torch's schedules keep weights and gradients unsharded until the last micro-batch has passed;
then gradients are summed over the data ranks, once per step. With stage 3, weights are gathered layer by layer and
gradients reduce-scattered after every micro-batch, as without a pipeline. Stage 3 excludes zero bubble and DualPipeV,
which compute weight gradients separately from input gradients: torch 2.13 collects the weights before they are
gathered, finds none, and silently loses their gradients.

Shapes: B samples, T positions of this rank, D features. Hidden states are [B, T / tp, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from foundation.errors import HeadraceError
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.base import Objective
from pipeline.engines.common import model_dtype
from pipeline.engines.parallel.compilation import compiles, eager
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.parallel.overlapped_passes import OverlappedPasses
from pipeline.engines.parallel.stage_messages import StageMessage, receive_shapes, send_shapes
from pipeline.engines.parallel.stages import StageLayers
from pipeline.engines.torch_native.forward_backward import zero_sums
from pipeline.engines.torch_native.receive_buffers import SendsInFlight, StageWithFewBuffers


class StageModule(nn.Module):
    """One pipeline stage with the tensor-to-tensor interface of torch's schedules.

    Every schedule runs the forward passes of a stage in the order of the micro-batches, so the n-th forward pass
    belongs to micro-batch n.

    Args:
        decoder: the stage's decoder.
        stage: the stage's index and layers.
    """

    def __init__(self, decoder: Decoder, stage: StageLayers) -> None:
        super().__init__()
        self.decoder, self.stage = decoder, stage

    def begin(self, batches: Sequence[MicroBatch], objective: Objective, *, scale: float) -> None:
        """Sets the micro-batches of the next forward passes, in order."""
        self._micro_batches = iter(batches)
        self._objective, self._scale = objective, scale
        self.sums: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Computes hidden states, or on the last stage the scaled loss [1], from ids [B, T] or hidden states."""
        output: tuple[Tensor, ...] = self.decoder(inputs, next(self._micro_batches), self._objective)
        if not self.stage.last:
            return output[0]
        self.sums.append(torch.stack([each.detach() for each in output]).double())
        return torch.stack([output[0] * self._scale])


class PipelineSchedule:
    """The virtual stages of this rank and the schedule that runs them. Building it is collective.

    Args:
        run: the resolved config.
        stage_modules: this rank's stage modules, sharded, in stage order.
        mesh: this rank's coordinates and groups.
        hidden_size: D.
        device: this rank's device.
        passes: runner that overlaps the forward and the backward pass of a pair; None without `parallel.ep_overlap`.
    """

    def __init__(
        self,
        run: ResolvedRun,
        stage_modules: Sequence[StageModule],
        mesh: Mesh,
        *,
        hidden_size: int,
        device: torch.device,
        passes: OverlappedPasses | None = None,
    ) -> None:
        group = mesh.group("pp")
        assert group is not None
        self._stage_modules, self._group, self._device = stage_modules, group, device
        self._link_groups = mesh.link_groups() if run.virtual_stages > 1 else []
        self._run, self._passes = run, passes
        self._hidden_size, self._dtype, self._tp = hidden_size, model_dtype(run.config), run.topology.tp
        self._ids = torch.empty(
            run.batch.micro, run.batch.sequence_length // run.topology.cp, dtype=torch.int64, device="meta"
        )
        kind = run.config.parallel.schedule_kind
        assert not kind.splits_backward or run.config.zero_optimization.stage < 3, "see above"
        self._kind: Any = getattr(schedules, kind.torch)
        self._sends = None if issubclass(self._kind, schedules.Schedule1F1B) else SendsInFlight()
        self._micro_batches, self._schedule = 0, cast(Any, None)
        self._known: set[torch.Size] = set()  # shapes of ids whose messages have been sent
        shares = run.batch.shares
        self._carries = any(module.decoder.message is not None for module in stage_modules)
        if not self._carries:  # else at the first step, when the sizes of messages are known
            self._prepare(run.batch.accumulation if shares is None else len(shares.sizes[mesh.coordinates["dp"]]))

    def _prepare(self, micro_batches: int) -> None:
        """Builds the schedule for a number of micro-batches, which depends on the rank's share of a batch."""
        if micro_batches == self._micro_batches:
            return
        stages = [self._pipeline_stage(module, self._ids) for module in self._stage_modules]
        schedule_stages: Any = stages[0] if issubclass(self._kind, schedules.PipelineScheduleSingle) else stages
        # the loss is a sum over targets: gradients of micro-batches add up without division
        self._schedule = self._kind(schedule_stages, micro_batches, loss_fn=_output_is_loss, scale_grads=False)
        if self._passes is not None:
            pair = partial(_overlapped_pair, self._passes)
            self._schedule.register_custom_function(schedules.OVERLAP_F_B, pair)
        self._micro_batches = micro_batches

    def train(self, batches: Sequence[MicroBatch], objective: Objective, *, scale: float) -> Tensor:
        """Implements `ForwardBackward.train`."""
        if self._carries and batches[0].input_ids.shape not in self._known:
            self._learn_shapes(batches[0], objective)
        self._prepare(len(batches))
        for module in self._stage_modules:
            module.begin(batches, objective, scale=scale)
        first = self._stage_modules[0].stage.first
        ids = [torch.cat([batch.input_ids for batch in batches])] if first else []
        try:
            self._schedule.step(*ids, target=torch.zeros(self._micro_batches, device=self._device))
        except RuntimeError as error:
            own = _own_error(error)
            if own is None:
                raise  # raised from itself, the error would lose its cause
            raise own from None  # it has its traceback, and is a cause of the other
        if self._sends is not None:
            self._sends.wait()
        return sum((each for module in self._stage_modules for each in module.sums), zero_sums(objective, self._device))

    def _learn_shapes(self, batch: MicroBatch, objective: Objective) -> None:
        """Scores a micro-batch, through which every stage gets to know the shapes of the messages to it."""
        modes = [module.training for module in self._stage_modules]
        with torch.no_grad(), eager(compiled=compiles(self._run.config.compile)):
            for module in self._stage_modules:
                module.eval()
            self.score(batch, objective)
        for module, mode in zip(self._stage_modules, modes, strict=True):
            module.train(mode)

    def score(self, batch: MicroBatch, objective: Objective) -> Tensor:
        """Implements `ForwardBackward.score`. Batches pass through the stages one at a time, without overlap."""
        sums, output = zero_sums(objective, self._device), None
        for module in self._stage_modules:
            module.begin([batch], objective, scale=1.0)
            stage = module.stage
            inputs = batch.input_ids if stage.first else self._receive(batch, stage, own=output)
            output = module(inputs)
            message, to = module.decoder.message, stage.index + 1
            if stage.last:
                sums += module.sums[0]
            elif not self._is_here(to):
                if message is not None and batch.input_ids.shape not in self._known:
                    send_shapes(message, to=self._rank_of_stage(to), group=self._group, device=self._device)
                dist.send(output.contiguous(), dst=self._rank_of_stage(stage.index + 1), group=self._group)
        self._known.add(batch.input_ids.shape)
        return sums

    def _receive(self, batch: MicroBatch, stage: StageLayers, *, own: Tensor | None) -> Tensor:
        """Returns the previous stage's output: `own` if that stage is on this rank, else a received tensor."""
        here = {module.stage.index: module.decoder.message for module in self._stage_modules}
        message, ids = here[stage.index], batch.input_ids.shape
        if self._is_here(stage.index - 1):
            assert own is not None, "stages are in order"
            if message is not None:
                before = here[stage.index - 1]
                assert before is not None
                message.shapes[ids] = before.sent_shapes
            return own
        source = self._rank_of_stage(stage.index - 1)
        if message is not None and ids not in self._known:
            receive_shapes(message, ids, source=source, group=self._group, device=self._device)
        hidden = self._empty_input(here[stage.index], batch.input_ids, self._device)
        dist.recv(hidden, src=source, group=self._group)
        return hidden

    def _empty_input(self, message: StageMessage | None, ids: Tensor, device: torch.device | str) -> Tensor:
        """Makes a buffer for the previous stage's message."""
        if message is None:
            return self._empty_hidden_states(ids, device)
        return torch.empty(message.size(ids.shape), dtype=self._dtype, device=device)

    def _is_here(self, index: int) -> bool:
        return any(module.stage.index == index for module in self._stage_modules)

    def _rank_of_stage(self, index: int) -> int:
        """Returns the global rank of the pipeline rank that has a stage."""
        return dist.get_global_rank(self._group, self._run.rank_of_stage(index))

    def _empty_hidden_states(self, ids: Tensor, device: torch.device | str) -> Tensor:
        samples, positions = ids.shape
        return torch.empty(samples, positions // self._tp, self._hidden_size, dtype=self._dtype, device=device)

    def _pipeline_stage(self, module: StageModule, ids: Tensor) -> StageWithFewBuffers:
        stage, message = module.stage, module.decoder.message
        inputs = ids if stage.first else self._empty_input(message, ids, "meta").requires_grad_()
        hidden = self._empty_hidden_states(ids, "meta")
        if message is not None:
            hidden = torch.empty(message.sent_size, dtype=self._dtype, device="meta")
        made = StageWithFewBuffers(
            module,
            stage.index,
            stage.count,
            self._device,
            input_args=inputs,
            output_args=torch.empty(1, device="meta", requires_grad=True) if stage.last else hidden.requires_grad_(),
            group=self._group,
        )
        made.link_groups, made.sends = self._link_groups, self._sends
        return made


def _overlapped_pair(passes: OverlappedPasses, action: Any, context: Any) -> None:
    """Runs torch's action OVERLAP_F_B as `_PipelineScheduleRuntime` runs F and B, but overlaps the two.

    It waits for the passes' messages before the first turn, and sends their results after the last turn.

    Args:
        passes: runner that overlaps the two passes.
        action: torch's action, whose sub-actions are F and B of two stages of this rank.
        context: the schedule, and the arguments of the step.
    """
    schedule, (forward, backward) = context.schedule_ref, action.sub_actions
    stages = {stage.stage_index: stage for stage in schedule._stages}
    first, second = stages[forward.stage_index], stages[backward.stage_index]
    sent, returned = (first.stage_index, forward.microbatch_index), (second.stage_index, backward.microbatch_index)
    for received, key in ((schedule.fwd_recv_ops, sent), (schedule.bwd_recv_ops, returned)):
        if key in received:  # the message is not from another stage of this rank
            schedules._wait_batch_p2p(received.pop(key))
    schedule._assert_unsharded(first)
    schedule._assert_unsharded(second)
    loss = schedule._maybe_get_loss(second, backward.microbatch_index)
    schedule.backward_counter[second.stage_index] += 1
    output = passes.run(
        lambda: first.forward_one_chunk(
            forward.microbatch_index,
            context.arg_mbs[forward.microbatch_index],
            context.kwarg_mbs[forward.microbatch_index],
        ),
        lambda: second.backward_one_chunk(
            backward.microbatch_index,
            loss=loss,
            full_backward=True,
            last_backward=schedule.backward_counter[second.stage_index] == schedule._n_microbatches,
        ),
    )
    schedule._maybe_compute_loss(first, output, context.target_mbs, forward.microbatch_index)
    if (following := stages.get(first.stage_index + 1)) is not None:
        following.set_local_fwd_input(output, forward.microbatch_index)
    if (before := stages.get(second.stage_index - 1)) is not None:
        before.set_local_bwd_input(second.get_local_bwd_output(backward.microbatch_index), backward.microbatch_index)


def _output_is_loss(loss: Tensor, _target: Tensor) -> Tensor:
    """Loss function for torch's schedules, which returns the last stage's output: it already is the loss."""
    return loss.sum()


def _own_error(error: BaseException) -> HeadraceError | None:
    """Finds our error among the causes of the error of a torch schedule; None if the error is another's."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, HeadraceError):
        found = found.__cause__
    return found
