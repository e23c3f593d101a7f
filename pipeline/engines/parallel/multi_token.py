"""Multi-token prediction in an engine: its targets, its modules' forward pass and its loss.

For L = loss of the next token, and L_k = cross-entropy of the token k positions after it, the objective is
L + weight / depth x (L_1 + ... + L_depth). All are sums over targets, which the engine divides by the number of
next-token targets. Source: DeepSeek-AI 2024, DeepSeek-V3 (arXiv:2412.19437), equations 24 and 25.

Shapes: B samples, T positions of this rank, S positions of the sequence, D features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from foundation.user_function import load_function
from pipeline.config.sections.run import LossSection
from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.engines.objective import CrossEntropy, Loss
from pipeline.engines.parallel.collectives import all_gather
from pipeline.engines.parallel.fused_head import LossFunction
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard
from pipeline.engines.user_loss import FIELD, UserLoss
from pipeline.models.multi_token import LayerCall, modules_of


class MultiTokenObjective:
    """Base class of objectives for which the decoder also runs the modules.

    Attributes:
        further: objective called with the logits of each module.
    """

    further: LossFunction

    def combined(
        self, sums: tuple[Tensor, ...], further: Sequence[Tensor], ahead: TokensAhead, batch: MicroBatch
    ) -> tuple[Tensor, ...]:
        """Returns (total, *parts).

        Args:
            sums: (total, *parts) of the next token.
            further: total of each module.
            ahead: shifts tokens of the sequence.
            batch: the micro-batch.
        """
        raise NotImplementedError


class MultiTokenLoss(MultiTokenObjective):
    """Cross-entropy of the next token and, weighted, of further tokens; an `engines.objective.Objective`.

    Called with logits it is the loss of the next token; the decoder adds the losses of further tokens with `combined`.

    Args:
        base: loss of the next token.
        depth: number of further tokens.
        weight: weight of the mean of their losses.
    """

    def __init__(self, base: CrossEntropy, *, depth: int, weight: float) -> None:
        self._base, self._depth, self._weight = base, depth, weight
        self.further = CrossEntropy()
        names = [f"mtp_loss_{k}" for k in range(1, depth + 1)] if depth > 1 else []
        self.parts = (*(base.parts or ("cross_entropy",)), "mtp_loss", *names)

    def extra_targets(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Returns none."""
        return self._base.extra_targets(batch)

    def __call__(
        self, logits: Tensor, labels: Tensor, *_extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        """Computes the loss of the next token."""
        return self._base(logits, labels, vocabulary=vocabulary)

    def with_gradient(
        self, logits: Tensor, labels: Tensor, *_extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> tuple[Loss, Tensor]:
        """Computes the loss of the next token, and its gradient."""
        return self._base.with_gradient(logits, labels, vocabulary=vocabulary)

    def combined(
        self,
        sums: tuple[Tensor, ...],
        further: Sequence[Tensor],
        _ahead: TokensAhead,
        _batch: MicroBatch,
    ) -> tuple[Tensor, ...]:
        """Implements `MultiTokenObjective.combined`."""
        total, *parts = sums
        mean = torch.stack(list(further)).sum() / self._depth
        each = further if self._depth > 1 else ()
        reported = (*(parts or (total.detach(),)), mean.detach(), *(one.detach() for one in each))
        return (total + self._weight * mean, *reported)


def training_loss(section: LossSection) -> CrossEntropy | MultiTokenLoss | UserLoss:
    """Returns the objective of a training without a teacher, from the config's section.

    Raises:
        ConfigError: the user's own loss cannot be imported.
    """
    if section.function is not None:
        return UserLoss(load_function(section.function, field=FIELD).call)
    base = CrossEntropy(z_loss=section.z_loss)
    return base if section.mtp is None else MultiTokenLoss(base, depth=section.mtp.depth, weight=section.mtp.weight)


@dataclass(frozen=True)
class SequenceParts:
    """The ranks that share a sequence (context parallelism).

    Attributes:
        group: the cp ranks.
        chunks: positions of every rank, in the order of the ranks.
    """

    group: dist.ProcessGroup
    chunks: tuple[range, ...]

    def whole(self, part: Tensor) -> Tensor:
        """Gathers parts [..., T] of all ranks to [..., S]."""
        gathered = all_gather(part, self.group, dim=-1)
        return gathered[..., self._positions(part.device).argsort()]

    def own(self, whole: Tensor) -> Tensor:
        """Returns this rank's part [..., T] of [..., S]."""
        return whole[..., self._positions(whole.device).chunk(self.group.size())[self.group.rank()]]

    def _positions(self, device: torch.device) -> Tensor:
        return torch.cat([torch.arange(each.start, each.stop, device=device) for each in self.chunks])


def tokens_ahead(ids: Tensor, labels: Tensor, documents: Tensor | None, *, by: int) -> tuple[Tensor, Tensor]:
    """Shifts ids and labels of whole sequences; returns ids, with 0 past the end, and labels, with IGNORE.

    A target in another document than the position is none: its label is IGNORE.

    Args:
        ids: int64 [B, S].
        labels: int64 [B, S], next tokens.
        documents: index of every token's document, [B, S]; None without a document mask.
        by: number of positions.
    """
    by = min(by, ids.shape[1])
    ahead, targets = F.pad(ids[:, by:], (0, by)), F.pad(labels[:, by:], (0, by), value=IGNORE)
    if documents is not None:
        targets[:, :-by].masked_fill_(documents[:, by:] != documents[:, :-by], IGNORE)
    return ahead, targets


class TokensAhead:
    """Runs the modules of the last pipeline stage.

    The arguments of their decoder layers (masks, rotary tables) are those of the model's layer that was copied, which
    has run before in the same forward pass.

    Args:
        causal: Hugging Face's `...ForCausalLM`, or the last pipeline stage of it, with modules.
        sequence: the ranks that share a sequence; None without context parallelism.
    """

    def __init__(self, causal: Any, sequence: SequenceParts | None) -> None:
        self._causal, self._sequence = causal, sequence
        self._copied = _remember_calls(causal.get_submodule(causal.mtp.source))

    def run(self, hidden: Tensor, batch: MicroBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields, for each module, hidden states for the head and labels int64 [B, T].

        Args:
            hidden: last hidden states of the model, [B, T, D] ([B, T / tp, D] with tensor parallelism).
            batch: the micro-batch.
        """
        call, embedding = self._copied.take_call(), self._causal.get_input_embeddings()
        for k, module in enumerate(modules_of(self._causal), 1):
            ahead, targets = self.shifted(batch.input_ids, batch, by=k)
            hidden = module(hidden, embedding(ahead), call)
            yield hidden, targets

    def shifted(self, ids: Tensor, batch: MicroBatch, *, by: int) -> tuple[Tensor, Tensor]:
        """Shifts ids and the labels of a micro-batch, each int64 [B, T]; see `tokens_ahead`."""
        if self._sequence is None:
            return tokens_ahead(ids, batch.labels, batch.documents, by=by)
        whole_ids, whole_labels = self._sequence.whole(torch.stack((ids, batch.labels)))
        shifted = tokens_ahead(whole_ids, whole_labels, batch.documents, by=by)
        found = self._sequence.own(torch.stack(shifted))
        return found[0], found[1]


class _RemembersCall(nn.Module):
    """Base class added to a decoder layer's class: remembers the arguments of the last call.

    `__call__` is outside of what is compiled or recomputed.
    """

    _last_call: LayerCall | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer."""
        self._last_call = args[1:], {key: value for key, value in kwargs.items() if key != "hidden_states"}
        return super().__call__(*args, **kwargs)

    def take_call(self) -> LayerCall:
        """Returns the arguments of the last call besides the hidden states, and forgets them."""
        call, self._last_call = self._last_call, None
        assert call is not None, "the layer did not run"
        return call


def _remember_calls(layer: Any) -> _RemembersCall:
    kind = type(layer)
    layer.__class__ = type(kind.__name__, (_RemembersCall, kind), {"__module__": kind.__module__})
    assert isinstance(layer, _RemembersCall)
    return layer
