"""The root module that every engine runs: a Hugging Face decoder, or a pipeline stage of one, up to the loss.

The loss is computed inside, because a sharding engine gathers parameters for the time of a forward pass only, and
because the logits of a whole sequence need not exist: they are scored piece by piece.

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
from pipeline.models.attention import AttentionContext, Exchange
from pipeline.parallel.collectives import all_gather
from pipeline.parallel.tensor import TensorParallel
from pipeline.parallel.vocabulary import WHOLE, Vocabulary


class _Loss(Protocol):
    total: Tensor
    parts: tuple[Tensor, ...]


class Scoring(Protocol):
    """What the decoder needs of an objective; see `engines.objective.Objective`."""

    def against(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """What positions are scored against besides their labels."""
        ...

    def __call__(self, logits: Tensor, labels: Tensor, *against: Tensor, vocabulary: Vocabulary = WHOLE) -> Any:
        """Scores logits."""
        ...


@dataclass(frozen=True)
class DecoderLayout:
    """How a decoder computes; none of it changes what is learnt.

    Attributes:
        first: it has the embedding: its input is ids.
        last: it has the head: its output is the loss.
        tensor: how its layers were cut, or None.
        exchange: how attention sees the positions of other ranks (context parallelism), or None.
        offset: first position of this rank in the sequence.
        pieces: ranks that share a sequence (cp).
        chunk: positions whose logits exist at one time; all when None.
        own_attention: attention is `models.attention`'s, which takes a context; else a Hugging Face one, plain.
    """

    first: bool = True
    last: bool = True
    tensor: TensorParallel | None = None
    exchange: Exchange | None = None
    offset: int = 0
    pieces: int = 1
    chunk: int | None = None
    own_attention: bool = True


class Decoder(nn.Module):
    """A causal language model whose forward pass ends in the loss.

    Args:
        causal: Hugging Face's `...ForCausalLM`, perhaps cut by `parallel.tensor` and `parallel.stages`.
        form: how it computes.
        owners: canonical Hugging Face name -> the (module, attribute) pairs that hold the parameter.
    """

    def __init__(self, causal: nn.Module, form: DecoderLayout, owners: dict[str, list[tuple[nn.Module, str]]]) -> None:
        super().__init__()
        self.causal, self.form = causal, form
        self._owners = owners

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters this rank computes with, under their Hugging Face names, as they are now."""
        return {name: getattr(*places[0]) for name, places in self._owners.items()}

    def put(self, name: str, parameter: nn.Parameter) -> None:
        """Replaces a parameter in every module that holds it."""
        for module, key in self._owners[name]:
            module._parameters[key] = parameter

    def forward(self, inputs: Tensor, batch: MicroBatch, scoring: Scoring) -> tuple[Tensor, ...]:
        """Runs the decoder.

        Args:
            inputs: int64 ids [B, T] on the first stage, hidden states of the stage before on others.
            batch: the micro-batch, also on stages that do not see its ids.
            scoring: the objective.

        Returns:
            On the last stage (total, *parts): scalars, sums over targets. On others (hidden states,).
        """
        if self._plain:
            logits: Tensor = self.causal(
                input_ids=inputs, use_cache=False, **self._attention_arguments(batch, inputs)
            ).logits
            return _flat(scoring(logits, batch.labels, *scoring.against(batch)))
        named = {"input_ids" if self.form.first else "inputs_embeds": inputs}
        hidden: Tensor = self.causal.base_model(  # type: ignore[operator]
            **named, use_cache=False, **self._attention_arguments(batch, inputs)
        ).last_hidden_state
        if not self.form.last:
            return (hidden,)
        return self._score(hidden, batch, scoring)

    @property
    def _plain(self) -> bool:
        """The model's own forward pass, to its own logits, is all that is needed."""
        form = self.form
        return form.first and form.last and form.tensor is None and form.chunk is None

    def _attention_arguments(self, batch: MicroBatch, inputs: Tensor) -> dict[str, Any]:
        length = batch.labels.shape[1]
        positions = batch.positions
        if positions is None and self.form.own_attention:
            positions = torch.arange(self.form.offset, self.form.offset + length, device=inputs.device).unsqueeze(0)
        arguments: dict[str, Any] = {} if positions is None else {"position_ids": positions}
        if self.form.own_attention:
            arguments["context"] = AttentionContext(length * self.form.pieces, batch.documents, self.form.exchange)
        return arguments

    def _score(self, hidden: Tensor, batch: MicroBatch, scoring: Scoring) -> tuple[Tensor, ...]:
        vocabulary = WHOLE
        tensor = self.form.tensor
        head = self.causal.get_output_embeddings()  # type: ignore[operator]
        if tensor is not None:
            hidden = all_gather(hidden, tensor.group, dim=1)
            vocabulary = tensor.vocabulary

        def piece(hidden: Tensor, labels: Tensor, *against: Tensor) -> tuple[Tensor, ...]:
            return _flat(scoring(head(hidden), labels, *against, vocabulary=vocabulary))

        against = scoring.against(batch)
        chunk = self.form.chunk
        if chunk is None or chunk >= hidden.shape[1]:
            return piece(hidden, batch.labels, *against)
        pieces = zip(*(whole.split(chunk, dim=1) for whole in (hidden, batch.labels, *against)), strict=True)
        sums = [checkpoint(piece, *each, use_reentrant=False) for each in pieces]
        return tuple(torch.stack(column).sum() for column in zip(*sums, strict=True))


def _flat(loss: Any) -> tuple[Tensor, ...]:
    return (loss.total, *loss.parts)


def owners_of(causal: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Hugging Face name -> the (module, attribute) pairs that hold the parameter; a tied one has several."""
    names = {id(p): name for name, p in causal.named_parameters()}
    owners: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in causal.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners[names[id(parameter)]].append((module, key))
    return owners
