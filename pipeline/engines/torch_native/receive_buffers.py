"""A pipeline stage whose receive buffers live as long as a message is on its way or its tensor is needed, and whose
messages to each neighbour are in a group of their own.

Torch's stage has a buffer for the hidden states and one for the gradients of every micro-batch of a step, for the whole
run: of the 120 micro-batches of DeepSeek-V3 on 16 stages 14 GB. Schedules ask for the operations that receive just
before they start them, and take the tensor when they have come: that is when a buffer is made, and given away. Until
then, and afterwards, it is on the meta device. Those in use are as many as there are micro-batches in flight.
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


class StageWithFewBuffers(PipelineStage):
    """`PipelineStage` with buffers of the messages in flight alone; takes the same arguments.

    Attributes:
        link_groups: groups of the same ranks by the number of a link (`topology.link_of`); the stage's when empty.
    """

    link_groups: Sequence[dist.ProcessGroup] = ()

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
        """The operations that send a micro-batch's hidden states."""
        return self._in_link_groups(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The operations that send a micro-batch's gradients."""
        return self._in_link_groups(super().get_bwd_send_ops(bwd_chunk_id))

    def _in_link_groups(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Puts each operation in the group of its link, with a contiguous tensor: NCCL sends by pointer and warns."""
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
        """Context in which torch makes buffers on meta, by the stage's device."""
        device, self.device = self.device, _META
        try:
            yield
        finally:
            self.device = device

    def _move(self, messages: Sequence[Any], device: torch.device) -> None:
        """Replaces buffers by empty ones on a device; buffers already on it stay, and so do root arguments."""
        for message in messages:
            buffer: Tensor | None = getattr(message, "buffer", None)
            if buffer is not None and buffer.device != device:
                message.buffer = torch.empty_like(buffer, device=device).requires_grad_(buffer.requires_grad)
