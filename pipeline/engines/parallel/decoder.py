"""The root module of every engine: a Hugging Face decoder, or a pipeline stage of it, including the (chunked) loss.

The module computes the loss for two reasons: a sharding engine gathers parameters only during a forward pass, and with
a chunked loss, fused with the head, the logits of the full sequence never exist.

Shapes: B samples, T positions of this rank (the sequence divided by cp), D features, V ids. Between the blocks of a
tensor-parallel model hidden states are [B, T / tp, D].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.engines.parallel.collectives import all_gather
from pipeline.engines.parallel.decoding import DecodingBatch
from pipeline.engines.parallel.features import FeatureLoss, recording
from pipeline.engines.parallel.fused_head import LossFunction, LossTask, fuse_head, total_and_parts
from pipeline.engines.parallel.multi_token import MultiTokenObjective, SequenceParts, TokensAhead
from pipeline.engines.parallel.own_head import AfterHead, OwnHead
from pipeline.engines.parallel.recurrent import Recurrent
from pipeline.engines.parallel.stage_messages import StageMessage
from pipeline.engines.parallel.stages import StageEnds
from pipeline.engines.parallel.tensor import TensorParallel
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY
from pipeline.models.attention import ContextParallelAttention, RecordAttention, attention_windows, make_context
from pipeline.models.decoder_layers import base_of
from pipeline.models.longrope import follow_sequence_lengths, lengths_so_far, sequence_lengths
from pipeline.models.multi_token import modules_of


class TokenCounter(Protocol):
    """The part of an `ExpertBalancer` that the decoder uses."""

    def begin_micro_batch(self, counted: Tensor) -> None:
        """Sets which tokens of the next forward pass count."""
        ...


@dataclass(frozen=True)
class DecoderLayout:
    """Settings of a decoder's computation, which do not change the result.

    Attributes:
        first: whether the decoder has the embedding, so that its input is ids.
        last: whether the decoder has the head, so that its output is the loss.
        tensor: tensor-parallel shards of this rank, or None.
        cp_attention: attention across the ranks of a sequence (context parallelism), or None.
        chunks: this rank's positions of the sequence (`topology.sequence_chunks`); all when empty.
        cp_size: number of ranks that share a sequence (cp).
        chunk: positions of each sample whose logits exist at the same time (chunked loss); all when None.
        own_attention: whether attention is that of `models.attention`, which needs a context, not Hugging Face's.
        dtype: dtype of queries and masks.
        own_head: whether the model does more to its logits than its head's product (`own_head`).
        recurrent: the documents for recurrent blocks; None for a model without, or if it runs as it is.
        sequence: the parts of a sequence on all ranks that share it, if modules predict more tokens; else None.
    """

    first: bool = True
    last: bool = True
    tensor: TensorParallel | None = None
    cp_attention: ContextParallelAttention | None = None
    chunks: tuple[range, ...] = ()
    cp_size: int = 1
    chunk: int | None = None
    own_attention: bool = True
    dtype: torch.dtype = torch.float32
    own_head: bool = False
    recurrent: Recurrent | None = None
    sequence: SequenceParts | None = None


class Decoder(nn.Module):
    """A causal language model whose forward pass returns the loss.

    Args:
        causal: Hugging Face's `...ForCausalLM`, possibly sharded by `parallel.tensor` and `parallel.stages`.
        layout: settings of the computation.
        owners: canonical Hugging Face name -> the (module, attribute) pairs that have the parameter.

    Raises:
        ValueError: the loss is chunked, but the head is not a linear layer.

    Attributes:
        balancer: counter that learns before every forward pass which tokens count; None for a dense model.
        record_attention: callback for the queries, keys and values of attention (`features.recording`); None otherwise.
    """

    def __init__(
        self, causal: nn.Module, layout: DecoderLayout, owners: dict[str, list[tuple[nn.Module, str]]]
    ) -> None:
        super().__init__()
        self.causal, self.layout = causal, layout
        self._owners = owners
        self._ends = StageEnds.of(causal, dtype=layout.dtype, first=layout.first, last=layout.last)
        self._own_head = OwnHead(causal) if layout.last and layout.own_head else None
        self._windows = attention_windows(causal.config)
        self._lengths = follow_sequence_lengths(causal)
        self._ahead = TokensAhead(causal, layout.sequence) if layout.last and modules_of(causal) else None
        self.balancer: TokenCounter | None = None
        self.record_attention: RecordAttention | None = None
        if layout.last and layout.chunk is not None:
            fuse_head(causal.get_output_embeddings())  # type: ignore[operator]

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Returns this rank's current parameters, by Hugging Face name."""
        return {name: getattr(*pairs[0]) for name, pairs in self._owners.items()}

    def set_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Replaces a parameter in every module that has it."""
        for module, key in self._owners[name]:
            module._parameters[key] = parameter

    def forward(self, inputs: Tensor, batch: MicroBatch, objective: LossFunction) -> tuple[Tensor, ...]:
        """Runs the decoder.

        Args:
            inputs: int64 ids [B, T] on the first stage, hidden states of the previous stage on others.
            batch: the micro-batch, also on stages that do not use its ids.
            objective: the loss.

        Returns:
            On the last stage (total, *parts), scalar sums over targets; on other stages (hidden states,).
        """
        if self.balancer is not None:
            self.balancer.begin_micro_batch(self._routed_tokens(batch))
        if not (self.layout.last and isinstance(objective, FeatureLoss)):
            return self._output(inputs, batch, objective)
        with recording(self, objective.wanted) as features:
            total, *parts = self._output(inputs, batch, objective)
        added, own_parts = objective.matched(features, batch)
        return (total + added, *parts, *own_parts)

    def _output(self, inputs: Tensor, batch: MicroBatch, objective: LossFunction) -> tuple[Tensor, ...]:
        if self._uses_model_forward:
            logits = self.logits(inputs, batch)
            return total_and_parts(objective(logits, batch.labels, *objective.extra_targets(batch)))
        hidden = self.hidden_states(inputs, batch)
        if not self.layout.last:
            return (hidden,)
        sums = self._loss(self.gathered(hidden), batch, objective)
        if not isinstance(objective, MultiTokenObjective):
            return sums
        assert self._ahead is not None
        further = [
            self._loss(self.gathered(states), replace(batch, labels=labels), objective.further)[0]
            for states, labels in self._ahead.run(hidden, batch)
        ]
        return objective.combined(sums, further, self._ahead, batch)

    def logits(self, inputs: Tensor, batch: MicroBatch) -> Tensor:
        """Computes the logits [B, T, V] by the model's own forward pass; the model must not be split over ranks."""
        arguments = self._attention_arguments(batch, inputs)
        logits: Tensor = self.causal(input_ids=inputs, **_cache_arguments(batch), **arguments).logits
        return logits

    @property
    def message(self) -> StageMessage | None:
        """The messages between stages if these are more than hidden states; else None."""
        return self._ends.message

    def hidden_states(self, inputs: Tensor, batch: MicroBatch) -> Tensor:
        """Computes the last hidden states [B, T / tp, D], on the last stage the head's input; see `forward`."""
        if self.message is not None:
            return self._with_message(self.message, inputs, batch)
        named = {"input_ids": inputs} if self.layout.first else {"inputs_embeds": self._ends.receive(inputs)}
        if self.layout.first and self.layout.tensor is not None and self.layout.tensor.derived:
            # a copy, since CTRL scales its embeddings in place
            named = {"inputs_embeds": self.causal.get_input_embeddings()(inputs).clone()}  # type: ignore[operator]
        hidden: Tensor = base_of(self.causal)(
            **named, **_cache_arguments(batch), **self._attention_arguments(batch, inputs)
        ).last_hidden_state
        if not self.layout.last:
            hidden = self._ends.sent().to(self.layout.dtype)
        self._ends.forget()
        return hidden

    def _with_message(self, message: StageMessage, inputs: Tensor, batch: MicroBatch) -> Tensor:
        """Computes the message to the next stage [N], or on the last stage the head's input."""
        if not self.layout.first:
            message.receive(inputs, batch.input_ids.shape)
        arguments = {**_cache_arguments(batch), **self._attention_arguments(batch, inputs)}
        hidden: Tensor = base_of(self.causal)(input_ids=batch.input_ids, **arguments).last_hidden_state
        if not self.layout.last:
            hidden = message.sent()
        message.forget()
        return hidden

    def gathered(self, hidden: Tensor) -> Tensor:
        """Gathers hidden states [B, T, D] of all positions of this rank's tp group."""
        tensor = self.layout.tensor
        return hidden if tensor is None else all_gather(hidden, tensor.group, dim=1)

    @property
    def _uses_model_forward(self) -> bool:
        """Whether the model's own forward pass can compute the logits."""
        layout = self.layout
        whole = layout.first and layout.last and layout.tensor is None and layout.chunk is None
        return whole and self._ahead is None

    def _routed_tokens(self, batch: MicroBatch) -> Tensor:
        """Marks the target tokens, bool [B, T / tp], in the shape of the hidden states that routers get."""
        counted = batch.labels != IGNORE
        tensor = self.layout.tensor
        if tensor is None:
            return counted
        return counted.chunk(tensor.group.size(), dim=1)[tensor.group.rank()]

    def _attention_arguments(self, batch: MicroBatch, inputs: Tensor) -> dict[str, Any]:
        length = batch.labels.shape[1]
        positions = batch.positions
        if self.layout.recurrent is not None:
            self.layout.recurrent.begin_micro_batch(batch.documents, cached=_cache_arguments(batch)["use_cache"])
        if self._lengths is not None:
            self._lengths.value = self._sequence_lengths(batch)
        if positions is None and self.layout.own_attention:
            chunks = self.layout.chunks or (range(length),)
            positions = torch.cat([torch.arange(each.start, each.stop, device=inputs.device) for each in chunks])[None]
        arguments: dict[str, Any] = {} if positions is None else {"position_ids": positions}
        if self.layout.own_attention and isinstance(batch, DecodingBatch):
            arguments["context"] = batch.context(self.layout.dtype)
        elif self.layout.own_attention:
            arguments["context"] = make_context(
                self._windows,
                length=length * self.layout.cp_size,
                dtype=self.layout.dtype,
                device=inputs.device,
                documents=batch.documents,
                cp_attention=self.layout.cp_attention,
                record=self.record_attention,
            )
        return arguments

    def _sequence_lengths(self, batch: MicroBatch) -> int | Tensor:
        """Returns the sequence lengths for longrope, as in `SequenceLengths`."""
        if isinstance(batch, DecodingBatch):
            assert batch.positions is not None
            return lengths_so_far(batch.positions, batch.documents)
        length = batch.labels.shape[1]
        if batch.documents is None:
            return length * self.layout.cp_size
        return sequence_lengths(batch.documents, self.layout.chunks or (range(length),))

    def _loss(self, hidden: Tensor, batch: MicroBatch, objective: LossFunction) -> tuple[Tensor, ...]:
        vocabulary = FULL_VOCABULARY if self.layout.tensor is None else self.layout.tensor.vocabulary
        head = self.causal.get_output_embeddings()  # type: ignore[operator]
        targets = (batch.labels, *objective.extra_targets(batch))
        if self._own_head is not None:
            after: LossFunction = AfterHead(objective, self._own_head.after)
            hidden, objective = self._own_head.head_input(hidden), after
        if self.layout.chunk is None:
            return total_and_parts(objective(head(hidden), *targets, vocabulary=vocabulary))
        rows = len(hidden) * self.layout.chunk
        task = LossTask(objective, targets[0], targets[1:], vocabulary, rows)
        sums: tuple[Tensor, ...] = head(hidden, task=task)
        return sums


def _cache_arguments(batch: MicroBatch) -> dict[str, Any]:
    return batch.cache_arguments() if isinstance(batch, DecodingBatch) else {"use_cache": False}


def local_owners(
    owners: dict[str, list[tuple[nn.Module, str]]], stage: nn.Module
) -> dict[str, list[tuple[nn.Module, str]]]:
    """Returns the pairs of `parameter_owners` of the full model that are left in it after `keep_stage`."""
    here = set(stage.modules())
    kept = {name: [(m, key) for m, key in of if m in here and key in m._parameters] for name, of in owners.items()}
    return {name: pairs for name, pairs in kept.items() if pairs}


def parameter_owners(causal: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Maps Hugging Face names to the parameter's (module, attribute) pairs; a tied parameter has several pairs."""
    names = {id(p): name for name, p in causal.named_parameters()}
    owners: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in causal.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners[names[id(parameter)]].append((module, key))
    return owners
