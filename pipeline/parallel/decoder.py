"""The root module of every engine: a Hugging Face decoder, or a pipeline stage of it, including the (chunked) loss.

The loss is computed inside the module, because a sharding engine gathers parameters only during a forward pass, and
because with a chunked loss the logits of the full sequence never exist.

Shapes: B samples, T positions of this rank (the sequence divided by cp), D features, V ids. Between the blocks of a
tensor-parallel model hidden states are [B, T / tp, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.data.loader import MicroBatch
from pipeline.models.attention import AttentionContext, ContextParallelAttention
from pipeline.parallel.collectives import all_gather
from pipeline.parallel.tensor import TensorParallel
from pipeline.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard


class _Loss(Protocol):
    total: Tensor
    parts: tuple[Tensor, ...]


class LossFunction(Protocol):
    """The part of an objective that the decoder uses; see `engines.objective.Objective`."""

    def extra_targets(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Targets per position besides the labels."""
        ...

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Any:
        """Computes the loss."""
        ...


@dataclass(frozen=True)
class DecoderLayout:
    """How a decoder is computed; none of it changes the result.

    Attributes:
        first: it has the embedding: its input is ids.
        last: it has the head: its output is the loss.
        tensor: its tensor-parallel shards, or None.
        cp_attention: attention across the ranks of a sequence (context parallelism), or None.
        offset: first position of this rank in the sequence.
        cp_size: ranks that share a sequence (cp).
        chunk: positions whose logits exist at the same time (chunked loss); all when None.
        own_attention: whether attention is that of `models.attention`, which takes a context, or Hugging Face's.
    """

    first: bool = True
    last: bool = True
    tensor: TensorParallel | None = None
    cp_attention: ContextParallelAttention | None = None
    offset: int = 0
    cp_size: int = 1
    chunk: int | None = None
    own_attention: bool = True


class Decoder(nn.Module):
    """A causal language model whose forward pass returns the loss.

    Args:
        causal: Hugging Face's `...ForCausalLM`, possibly sharded by `parallel.tensor` and `parallel.stages`.
        layout: how it is computed.
        owners: canonical Hugging Face name -> the (module, attribute) pairs that hold the parameter.
    """

    def __init__(
        self, causal: nn.Module, layout: DecoderLayout, owners: dict[str, list[tuple[nn.Module, str]]]
    ) -> None:
        super().__init__()
        self.causal, self.layout = causal, layout
        self._owners = owners

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """This rank's current parameters, by Hugging Face name."""
        return {name: getattr(*pairs[0]) for name, pairs in self._owners.items()}

    def set_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Replaces a parameter in every module that holds it."""
        for module, key in self._owners[name]:
            module._parameters[key] = parameter

    def forward(self, inputs: Tensor, batch: MicroBatch, objective: LossFunction) -> tuple[Tensor, ...]:
        """Runs the decoder.

        Args:
            inputs: int64 ids [B, T] on the first stage, hidden states of the previous stage on others.
            batch: the micro-batch, also on stages that do not take its ids.
            objective: the loss.

        Returns:
            On the last stage (total, *parts): scalars, sums over targets. On others (hidden states,).
        """
        if self._uses_model_forward:
            logits: Tensor = self.causal(
                input_ids=inputs, use_cache=False, **self._attention_arguments(batch, inputs)
            ).logits
            return _total_and_parts(objective(logits, batch.labels, *objective.extra_targets(batch)))
        named = {"input_ids" if self.layout.first else "inputs_embeds": inputs}
        hidden: Tensor = self.causal.base_model(  # type: ignore[operator]
            **named, use_cache=False, **self._attention_arguments(batch, inputs)
        ).last_hidden_state
        if not self.layout.last:
            return (hidden,)
        return self._loss(hidden, batch, objective)

    @property
    def _uses_model_forward(self) -> bool:
        """Whether the model's own forward pass can compute the logits."""
        layout = self.layout
        return layout.first and layout.last and layout.tensor is None and layout.chunk is None

    def _attention_arguments(self, batch: MicroBatch, inputs: Tensor) -> dict[str, Any]:
        length = batch.labels.shape[1]
        positions = batch.positions
        if positions is None and self.layout.own_attention:
            positions = torch.arange(self.layout.offset, self.layout.offset + length, device=inputs.device).unsqueeze(0)
        arguments: dict[str, Any] = {} if positions is None else {"position_ids": positions}
        if self.layout.own_attention:
            full_length = length * self.layout.cp_size
            arguments["context"] = AttentionContext(full_length, batch.documents, self.layout.cp_attention)
        return arguments

    def _loss(self, hidden: Tensor, batch: MicroBatch, objective: LossFunction) -> tuple[Tensor, ...]:
        vocabulary = FULL_VOCABULARY
        tensor = self.layout.tensor
        head = self.causal.get_output_embeddings()  # type: ignore[operator]
        if tensor is not None:
            hidden = all_gather(hidden, tensor.group, dim=1)
            vocabulary = tensor.vocabulary

        def chunk_loss(hidden: Tensor, labels: Tensor, *extra_targets: Tensor) -> tuple[Tensor, ...]:
            return _total_and_parts(objective(head(hidden), labels, *extra_targets, vocabulary=vocabulary))

        extra_targets = objective.extra_targets(batch)
        size = self.layout.chunk
        if size is None or size >= hidden.shape[1]:
            return chunk_loss(hidden, batch.labels, *extra_targets)
        chunks = zip(*(full.split(size, dim=1) for full in (hidden, batch.labels, *extra_targets)), strict=True)
        sums = [checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]
        return tuple(torch.stack(column).sum() for column in zip(*sums, strict=True))


def _total_and_parts(loss: Any) -> tuple[Tensor, ...]:
    return (loss.total, *loss.parts)


def parameter_owners(causal: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Hugging Face name -> the (module, attribute) pairs that hold the parameter; a tied one has several."""
    names = {id(p): name for name, p in causal.named_parameters()}
    owners: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in causal.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners[names[id(parameter)]].append((module, key))
    return owners
