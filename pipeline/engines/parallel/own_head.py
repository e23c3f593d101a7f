"""The logits of models whose head is not the plain product of hidden states and weight.

Cohere scales its logits, Gemma 2 caps them, MiniCPM scales the head's input. The causal model's own forward pass is
run with its base model replaced by a given output, and its head by a function, so that no formula is copied here. The
operations after the head must act on each logit alone: they then hold for a shard of the vocabulary and for a chunk of
positions.

Shapes: B samples, T positions, D features, V' ids of this rank's shard of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.parallel.fused_head import LossFunction
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard
from pipeline.models.decoder_layers import base_of


class OwnHead:
    """The functions before and after the head in a causal model's own forward pass.

    Args:
        causal: Hugging Face's `...ForCausalLM`, or the last pipeline stage of it.
    """

    def __init__(self, causal: nn.Module) -> None:
        self._causal: Any = causal
        head = causal.get_output_embeddings()  # type: ignore[operator]
        base = base_of(causal)
        names = {id(module): name for name, module in causal.named_modules()}
        self._head, self._base = names[id(head)], names[id(base)]

    def head_input(self, hidden: Tensor) -> Tensor:
        """Computes the head's input [B, T, D] from the base model's output [B, T, D]."""
        inputs: list[Tensor] = []

        def head(states: Tensor) -> Tensor:
            inputs.append(states)
            return states.new_empty(1, 0, self._causal.config.vocab_size)

        self._run(hidden, head)
        return inputs[0]

    def after(self, product: Tensor) -> Tensor:
        """Computes logits [B, T, V'] from the head's product of the same shape."""
        logits: Tensor = self._run(product.new_empty(1, 0, self._causal.config.hidden_size), lambda _: product)
        return logits

    def _run(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Any:
        """Runs the causal model's own forward pass on an output of its base model."""
        base: Callable[..., Any] = lambda *_args, **_kwargs: _BaseOutput(hidden)  # noqa: E731
        head.weight = self._causal.get_output_embeddings().weight  # type: ignore[attr-defined]  # xLSTM reads its dtype
        replaced = {self._base: base, self._head: head}
        return type(self._causal).forward(_Replaced(self._causal, replaced)).logits


class _Replaced:
    """A model some of whose modules are replaced by functions, for one call; the model itself does not change."""

    def __init__(self, model: nn.Module, functions: dict[str, Callable[..., Any]]) -> None:
        self._model, self._functions = model, functions

    def __getattr__(self, key: str) -> Any:
        function = self._functions.get(key)
        return getattr(self._model, key) if function is None else function


class _BaseOutput:
    """Output of a base model, with nothing but hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, _key: str) -> None:
        return None


class AfterHead:
    """An objective on the head's product, with the functions that the model applies to it.

    Args:
        objective: the objective on the logits.
        after: function from the head's product to logits of the same shape.
    """

    def __init__(self, objective: LossFunction, after: Callable[[Tensor], Tensor]) -> None:
        self._objective, self._after = objective, after

    def extra_targets(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Returns the objective's targets besides the labels."""
        return self._objective.extra_targets(batch)

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Any:
        """Computes the loss, from the head's product in the place of logits."""
        return self._objective(self._after(logits), labels, *extra_targets, vocabulary=vocabulary)

    def with_gradient(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> tuple[Any, Tensor]:
        """Computes the loss, and its total's gradient with respect to the product, in fp32."""
        product = logits.detach().requires_grad_()
        with torch.enable_grad():
            logits = self._after(product)
        loss, gradient = self._objective.with_gradient(logits.detach(), labels, *extra_targets, vocabulary=vocabulary)
        (of_product,) = torch.autograd.grad(logits, product, gradient.to(logits.dtype))
        return loss, of_product.to(gradient.dtype)
