"""The student continues prompts within its engine: one forward pass per new token, of all ranks together.

All prompts have equal length, and so do all continuations. So every rank makes the same forward passes, and collectives
of ZeRO, FSDP and tensor parallelism always match. Samples that have ended are computed further and cut later.

The engine makes the passes in evaluation mode, never compiled, since shapes change with every token.

Shapes: n samples, P tokens of a prompt, G new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from pipeline.engines.base import Engine
from pipeline.engines.parallel.compilation import eager
from pipeline.engines.parallel.decoding import DecodingBatch, decoding_batch
from pipeline.run.distillation.sampling import Place, Sampler


@dataclass(frozen=True)
class Prompts:
    """Prompts of one length, on the engine's device.

    Attributes:
        ids: int64 [n, P].
        positions: int64 [n, P], position of every token in its document.
        documents: int32 [n, P], document of every token; None for one document.
        samples: int64 [n], the samples' indices in the step.
    """

    ids: Tensor
    positions: Tensor
    documents: Tensor | None
    samples: Tensor

    def extended(self, tokens: Tensor) -> Prompts:
        """Returns the prompts with one more token each, int64 [n], in the document of their last token."""
        documents = None if self.documents is None else torch.cat([self.documents, self.documents[:, -1:]], dim=1)
        positions = torch.cat([self.positions, self.positions[:, -1:] + 1], dim=1)
        return Prompts(torch.cat([self.ids, tokens[:, None]], dim=1), positions, documents, self.samples)

    def select(self, samples: slice) -> Prompts:
        """Returns some of the prompts."""
        documents = None if self.documents is None else self.documents[samples]
        return Prompts(self.ids[samples], self.positions[samples], documents, self.samples[samples])


@dataclass(frozen=True)
class Generator:
    """Continues prompts with a student's engine.

    Attributes:
        engine: the student's engine.
        sampler: draws the tokens.
        new_tokens: number of new tokens, G.
        multiple: number that must divide the positions of a forward pass: tp.
        kv_cache: whether keys and values are cached; otherwise all tokens are recomputed for each new one.
        compiled: whether layers are compiled for training.
        on_progress: called after every token, since a step's generation may exceed the hang timeout.
    """

    engine: Engine
    sampler: Sampler
    new_tokens: int
    multiple: int
    kv_cache: bool
    compiled: bool
    on_progress: Callable[[], None] = lambda: None

    def generate(self, prompts: Prompts, *, step: int) -> Tensor:
        """Continues prompts; returns the new tokens, int64 [n, G]. Collective."""
        drawn: list[Tensor] = []
        with eager(compiled=self.compiled):
            self.engine.forward_passes(self._passes(prompts, step, drawn), self.sampler)
        return torch.stack(drawn, dim=1)

    def _passes(self, prompts: Prompts, step: int, drawn: list[Tensor]) -> Iterator[DecodingBatch]:
        cache = DynamicCache() if self.kv_cache else None
        done = 0
        for number in range(self.new_tokens):
            length = prompts.ids.shape[1]
            batch = decoding_batch(
                prompts.ids[:, done:],
                prompts.positions[:, done:],
                prompts.documents,
                first=done,
                cache=cache,
                multiple=self.multiple,
            )
            width = batch.input_ids.shape[1]
            self.sampler.begin(Place(width, length - done - 1, prompts.samples, step, number))
            yield batch
            drawn.append(self.sampler.tokens())
            self.on_progress()
            prompts = prompts.extended(drawn[-1])
            if cache is not None:
                cache.crop(length - done - width)
                done = length
