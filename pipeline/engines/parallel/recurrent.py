"""Recurrent blocks (state-space layers, linear attention, convolutions) with document masks and divided sequences.

A block is recurrent if its output mixes documents although attention has a document mask. Which ones do is found on a
tiny model. Its forward pass is wrapped:

1. The sequence is gathered over the ranks that share it (context and tensor parallelism), in its own order.
2. Each document runs by itself, so that state and convolution start anew. Documents of similar lengths run together as
   rows that are padded at their ends, which causal blocks ignore; the padding is less than half.
3. If the heads can be divided (`recurrent_heads`), a rank computes some of them, and the ranks' summands are added and
   scattered. Otherwise every rank computes the whole block, and keeps its own positions.

Weights are whole on every rank. A rank's gradient is its summand of the whole one, as with data parallelism.

Shapes: B samples, T positions of this rank, S of the full sequence, D features; L positions of the longest document of
n that run together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.config.topology import sequence_chunks
from pipeline.engines.parallel.activation_checkpointing import WITHIN
from pipeline.engines.parallel.collectives import all_gather, reduce_scatter
from pipeline.engines.parallel.recurrent_heads import own_heads
from pipeline.engines.parallel.simulated_ranks import run_ranks
from pipeline.engines.parallel.tensor_plan import BlockCall, BlockKind, close, recorded_calls
from pipeline.engines.parallel.trial_cache import remembered
from pipeline.models.attention import ATTENTION_NAME, AttentionContext
from pipeline.models.hf_config import config_from, config_key
from pipeline.models.multi_token import original_module
from pipeline.models.resize.shrink import shrink

_V, _T, _RANKS = 32, 16, 2
_BOUNDARY = 6
"""First position of the second document of the tiny model's sequence."""
_ARGUMENT = "recurrent_documents"
"""Keyword argument of a layer's wrapped forward pass: the documents, also for its recomputation."""

Forward = Callable[..., Any]


def recurrent_blocks(model: nn.Module) -> dict[str, bool]:
    """Returns the names of a model's recurrent blocks, and whether their heads may be divided among ranks.

    Args:
        model: the full model or a pipeline stage of it, on any device.
    """
    kinds = _kinds(config_key(model.config))
    of_modules = ((name, BlockKind.of(original_module(model, name), module)) for name, module in model.named_modules())
    return {name: kinds[kind] for name, kind in of_modules if kind in kinds}


@cache
def _kinds(key: str) -> dict[BlockKind, bool]:
    """Returns the recurrent kinds of blocks of an architecture; cached by config, in memory and on disk."""
    rows = remembered("recurrent", [key], lambda: [[*kind, divides] for kind, divides in _tried_kinds(key).items()])
    return {BlockKind(name, module, tuple(parameters)): divides for name, module, parameters, divides in rows}


def _tried_kinds(key: str) -> dict[BlockKind, bool]:
    """Finds the recurrent kinds of blocks on a tiny model; none if that fails."""
    from pipeline.engines.parallel.architecture_trial import random_model  # noqa: PLC0415  # it imports this module

    documents = (torch.arange(_T) >= _BOUNDARY).int()[None]
    try:
        config = shrink(config_from(key), divide=_RANKS, layers=2, vocab_size=_V)
        calls = recorded_calls(random_model(config, attention=ATTENTION_NAME).eval(), documents=documents)
    except Exception:  # each architecture fails in its own way
        return {}
    outermost = (call for call in calls.items() if not any(call[0].startswith(f"{name}.") for name in calls))
    found = {BlockKind.of(name, call.block): call for name, call in outermost if _mixes_documents(call)}
    return {kind: _divides_heads(call) for kind, call in found.items()}


@torch.no_grad()
def _mixes_documents(call: BlockCall) -> bool:
    """Whether the first document's last position changes the output of the second; not of a block of tokens [N, D]."""
    if call.states.ndim < 3:
        return False
    other = call.states.clone()
    other[:, _BOUNDARY - 1] += 1.0
    changed, expected = call.run(call.block, other)[:, _BOUNDARY:], call.output[:, _BOUNDARY:]
    # a token that goes to another expert changes the rounding of its neighbours by 1e-7 of the largest output
    return float((changed - expected).abs().max()) > 1e-5 * float(expected.abs().max())


def _divides_heads(call: BlockCall) -> bool:
    """Whether the summands of two simulated ranks with half of the heads each are the block's output."""

    def run(group: dist.ProcessGroup) -> Tensor | None:
        forward = own_heads(call.block, rank=group.rank(), ranks=_RANKS, groups=(group,))
        with torch.no_grad():
            return None if forward is None else call.run(forward, call.states)

    try:
        summands = run_ranks(_RANKS, run)
    except Exception:  # shapes do not fit
        return False
    found = [each for each in summands if each is not None]
    return bool(found) and close(torch.stack(found).sum(0), call.output)


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that share the sequences of a block's input.

    Attributes:
        tp: the tensor-parallel ranks, among which this context-parallel rank's positions are divided; or None.
        cp: the context-parallel ranks; or None.
        zigzag: whether a context-parallel rank has two chunks (`topology.sequence_chunks`).
    """

    tp: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    zigzag: bool = False

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups in the order in which a tensor is gathered."""
        return tuple(group for group in (self.tp, self.cp) if group is not None)

    @property
    def count(self) -> int:
        """Number of ranks."""
        return (self.tp.size() if self.tp else 1) * (self.cp.size() if self.cp else 1)

    @property
    def rank(self) -> int:
        """This rank among them."""
        return (self.cp.rank() if self.cp else 0) * (self.tp.size() if self.tp else 1) + (
            self.tp.rank() if self.tp else 0
        )

    def gathered(self, part: Tensor, length: int) -> Tensor:
        """Gathers [B, T, ...] to [B, S, ...]. Backward: gradients are summed over the ranks and scattered.

        Args:
            part: the rank's positions, or those of all its tensor-parallel ranks (rotary embeddings).
            length: S.
        """
        for group in self.groups if part.shape[1] * self.count == length else self.groups[1:]:
            part = all_gather(part, group, dim=1)
        return part if not self.zigzag else part[:, self._order(part).argsort()]

    def own(self, full: Tensor) -> Tensor:
        """Returns this rank's positions [B, T, ...] of [B, S, ...]."""
        if self.zigzag:
            full = full[:, self._order(full)]
        return full.chunk(self.count, dim=1)[self.rank]

    def scattered(self, full: Tensor) -> Tensor:
        """Sums [B, S, ...] over the ranks, and returns this rank's positions [B, T, ...]."""
        if self.zigzag:
            full = full[:, self._order(full)]
        for group in reversed(self.groups):
            full = reduce_scatter(full, group, dim=1)
        return full

    def _order(self, full: Tensor) -> Tensor:
        """Returns the positions int64 [S] of a sequence as the ranks' parts follow each other."""
        assert self.cp is not None
        size, length = self.cp.size(), full.shape[1]
        ranges = (sequence_chunks(length, cp=size, cp_rank=rank, zigzag=True) for rank in range(size))
        return torch.tensor(list(chain(*chain(*ranges))), device=full.device)


@dataclass(frozen=True)
class DocumentRows:
    """The documents of a micro-batch, as padded rows of several calls.

    Attributes:
        calls: (int64 [n, L], bool [n, L]) of each call: index of every position in the flattened micro-batch [B x S],
            padding repeats a document's last; and whether it is no padding.
        back: int64 [B x S], index of every position in the concatenated outputs without padding.
    """

    calls: tuple[tuple[Tensor, Tensor], ...]
    back: Tensor

    @classmethod
    def of(cls, documents: Tensor) -> DocumentRows | None:
        """Makes the rows of documents [B, S]; None if every sample is one document. The host waits for the device."""
        table = documents.cpu()
        begins = torch.ones_like(table, dtype=torch.bool)
        begins[:, 1:] = table[:, 1:] != table[:, :-1]
        first = begins.flatten().nonzero()[:, 0]
        if len(first) == len(table):
            return None
        sizes = torch.diff(first, append=torch.tensor([table.numel()]))
        classes = torch.ceil(sizes.double().log2())  # lengths in a class differ by less than a factor of two
        calls = [_rows(first[classes == each], sizes[classes == each]) for each in classes.unique()]
        back = torch.cat([index[real] for index, real in calls]).argsort()
        device = documents.device
        return cls(tuple((index.to(device), real.to(device)) for index, real in calls), back.to(device))

    def run(self, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: tuple[int, int]) -> Any:
        """Runs a function of tensors of a shape [B, S, ...] on each document, and puts its outputs together."""
        outputs = [
            _each(partial(_selected, index, shape), partial(_context_of_rows, index), forward, args, kwargs)
            for index, _ in self.calls
        ]
        if isinstance(outputs[0], Tensor):
            return self._together(outputs, shape)
        several = (self._together(list(each), shape) for each in zip(*outputs, strict=True))
        return type(outputs[0])(several)

    def _together(self, outputs: list[Any], shape: tuple[int, int]) -> Any:
        if not _is_sequence(outputs[0], tuple(self.calls[0][0].shape)):
            return outputs[0]
        real = [output[real] for output, (_, real) in zip(outputs, self.calls, strict=True)]
        return torch.cat(real)[self.back].unflatten(0, shape)


def _rows(first: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a call's indices and whether they are no padding, from the documents' first indices and sizes [n]."""
    within = torch.arange(int(sizes.max()))
    return first[:, None] + torch.minimum(within, sizes[:, None] - 1), within < sizes[:, None]


def _is_sequence(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a value is a tensor of positions, of all samples or of one for all."""
    return isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == shape[1] and len(value) in (1, shape[0])


def _selected(index: Tensor, shape: tuple[int, int], value: Any) -> Any:
    if not _is_sequence(value, shape):
        return value
    return value.expand(shape[0], *value.shape[1:]).flatten(0, 1)[index]


def _context_of_rows(index: Tensor, context: AttentionContext) -> AttentionContext:
    return replace(context, length=index.shape[1], documents=None, masks={})


def _each(
    change: Callable[[Any], Any],
    change_context: Callable[[AttentionContext], AttentionContext],
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls a function with changed tensors and contexts, also in tuples (rotary embeddings)."""

    def changed(value: Any) -> Any:
        if isinstance(value, AttentionContext):
            return change_context(value)
        return type(value)(map(changed, value)) if type(value) in (tuple, list) else change(value)

    return forward(*map(changed, args), **{key: changed(value) for key, value in kwargs.items()})


class Recurrent:
    """The documents for a model's recurrent blocks. A layer keeps them as an argument for its recomputation."""

    def __init__(self) -> None:
        self.rows: DocumentRows | None = None

    def begin_micro_batch(self, documents: Tensor | None, *, cached: bool = False) -> None:
        """Sets the documents [B, S] of the next forward pass; with a cache, it continues one document per sample."""
        self.rows = None if documents is None or cached else DocumentRows.of(documents)

    def pass_on(self, _layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Pre-hook of a layer: adds the documents to its arguments."""
        return args, {**kwargs, _ARGUMENT: self.rows}

    def run_layer(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Runs a layer with the documents among its arguments, which may be an earlier micro-batch's."""
        self.rows = kwargs.pop(_ARGUMENT)
        return forward(*args, **kwargs)

    def run_block(self, forward: Forward, ranks: SequenceRanks, summands: bool, *args: Any, **kwargs: Any) -> Any:
        """Runs a recurrent block.

        Args:
            forward: the block's forward pass.
            ranks: the ranks that share a sequence.
            summands: whether the forward pass returns this rank's summand of the output.
            args, kwargs: the block's arguments; its first tensor of three dims is its input [B, T, D].
        """
        states = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.ndim == 3)
        batch, own = states.shape[:2]
        whole = (batch, own * ranks.count)
        parts = {(batch, own), (batch, own * (ranks.tp.size() if ranks.tp and ranks.cp else 1))}

        def on_documents(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs) if self.rows is None else self.rows.run(forward, args, kwargs, whole)

        if ranks.count == 1:
            return on_documents(*args, **kwargs)
        gathered = partial(ranks.gathered, length=whole[1])

        def gather(value: Any) -> Any:
            return next((gathered(value) for each in parts if _is_sequence(value, each)), value)

        output = _each(gather, _context_of_sequence, on_documents, args, kwargs)
        keep = partial(_if_sequence, ranks.scattered if summands else ranks.own, whole)
        return keep(output) if isinstance(output, Tensor) else type(output)(map(keep, output))


def _if_sequence(function: Callable[[Tensor], Tensor], shape: tuple[int, int], value: Any) -> Any:
    return function(value) if _is_sequence(value, shape) else value


def _context_of_sequence(context: AttentionContext) -> AttentionContext:
    return replace(context, masks={}, cp_attention=None)


def apply_recurrent(model: nn.Module, ranks: SequenceRanks, *, blocks: Mapping[str, bool]) -> Recurrent | None:
    """Wraps the recurrent blocks of a model, in place; its `forward` attributes change, parameters and names do not.

    Args:
        model: a Hugging Face causal language model, or a pipeline stage of it, on meta.
        ranks: the ranks that share a sequence.
        blocks: names of the blocks and whether their heads may be divided, from `recurrent_blocks`.

    Returns:
        What gets the documents of each micro-batch; None for a model without recurrent blocks.
    """
    found = {name: model.get_submodule(name) for name in blocks}
    if not found:
        return None
    recurrent = Recurrent()
    for name, block in found.items():
        divided = blocks[name] and ranks.count > 1
        own = own_heads(block, rank=ranks.rank, ranks=ranks.count, groups=ranks.groups) if divided else None
        # compiled graphs depend neither on the number nor on the lengths of documents
        run = torch.compiler.disable(recurrent.run_block)
        block.forward = partial(run, own or block.forward, ranks, own is not None)
    for layer in _layers_of(model, list(found.values())):
        which = WITHIN if hasattr(layer, WITHIN) else "forward"  # what a checkpoint runs again
        setattr(layer, which, partial(recurrent.run_layer, getattr(layer, which)))
        layer.register_forward_pre_hook(recurrent.pass_on, with_kwargs=True)
    return recurrent


def _layers_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the decoder layers that have a recurrent block, and may be run again in the backward pass."""
    inside = set(blocks)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return [layer for layer in layers if inside & set(layer.modules())]
