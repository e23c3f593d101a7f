"""A pipeline stage with short-lived buffers of messages, and with a separate group for messages to each neighbor.

For every micro-batch of a step, torch's stage has a buffer of hidden states and one of gradients, for the whole run: 14
GB for the 120 micro-batches of DeepSeek-V3 on 16 stages. Schedules request receive operations just before starting
them, which is when this stage makes a buffer; they take the tensor when it has arrived. Before and afterwards the
buffer is on the meta device. So there are as many buffers as micro-batches in flight.

A sent tensor lives as long as the work of its send (under NCCL in `WorkNCCL::outputs_`; see `pointToPoint` in
ProcessGroupNCCL.cpp). All schedules but 1F1B keep the works to the end of the step, when the tensors of all
micro-batches have piled up. `SendsInFlight` drops each once it has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from pipeline.config.topology import link_of

_META = torch.device("meta")


class SendsInFlight:
    """Starts sends, and keeps their works, with the tensors, until they have ended. The host waits in `wait` alone."""

    def __init__(self) -> None:
        self._works: list[dist.Work] = []

    def start(self, operations: Sequence[dist.P2POp]) -> None:
        """Starts sends without waiting for them; drops earlier sends that have ended."""
        self._works = [work for work in self._works if not _ended(work)]
        for each in operations:
            work = dist.isend(each.tensor, group=each.group, group_dst=each.group_peer)
            assert work is not None, "this rank is in the group"
            self._works.append(work)

    def wait(self) -> None:
        """Waits for all sends: on a GPU the current stream does, on a CPU the host."""
        while self._works:
            self._works.pop(0).wait()


def _ended(work: dist.Work) -> bool:
    """Whether a send has ended; raises its error. gloo (torch 2.13) reports the end only to a process that waits."""
    return work.is_completed() and bool(work.wait())


class StageWithFewBuffers(PipelineStage):
    """`PipelineStage` with buffers only for messages in flight; has the same arguments.

    Attributes:
        link_groups: groups of the same ranks by the number of a link (`topology.link_of`); else the stage's group.
        sends: starts the stage's sends; None for 1F1B, which starts some sends and receives as one operation.
    """

    link_groups: Sequence[dist.ProcessGroup] = ()
    sends: SendsInFlight | None = None

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._buffers_on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._buffers_on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Makes the buffers of a micro-batch's hidden states, and the operations that fill them."""
        self._move(self.args_recv_info[fwd_chunk_id], self.device)
        return self._in_link_groups(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Makes the buffers of a micro-batch's gradients, and the operations that fill them."""
        if self.has_backward and not self.is_last:
            self._move(self.grad_recv_info[bwd_chunk_id], self.device)
        return self._in_link_groups(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Makes the operations that send a micro-batch's hidden states; starts them and returns none with `sends`."""
        return self._started(self._in_link_groups(super().get_fwd_send_ops(fwd_chunk_id)))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Makes the operations that send a micro-batch's gradients; starts them and returns none with `sends`."""
        return self._started(self._in_link_groups(super().get_bwd_send_ops(bwd_chunk_id)))

    def _started(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        if self.sends is None:
            return operations
        self.sends.start(operations)
        return []

    def _in_link_groups(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Assigns operations to their links' groups, with contiguous tensors: NCCL sends by pointer and warns."""
        for each in operations:
            if self.link_groups:
                number = link_of(self.group_rank, each.group_peer, pp=self.group_size)
                each.group = self.link_groups[number]
            each.tensor = each.tensor.detach().contiguous() if each.op is dist.isend else each.tensor
        return operations

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        self._move(self.args_recv_info[fwd_chunk_id], _META)
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        self._move(self.grad_recv_info[bwd_chunk_id], _META)
        return received

    @contextlib.contextmanager
    def _buffers_on_meta(self) -> Iterator[None]:
        """Makes torch create buffers on meta within a block, by changing the stage's device."""
        device, self.device = self.device, _META
        try:
            yield
        finally:
            self.device = device

    def _move(self, messages: Sequence[Any], device: torch.device) -> None:
        """Replaces buffers by empty ones on a device; buffers already on it, and root arguments, stay."""
        for message in messages:
            buffer: Tensor | None = getattr(message, "buffer", None)
            if buffer is not None and buffer.device != device:
                message.buffer = torch.empty_like(buffer, device=device).requires_grad_(buffer.requires_grad)
