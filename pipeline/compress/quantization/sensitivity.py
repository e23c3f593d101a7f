"""Measures the KL divergence to the original when a single unit of a model is quantized.

Weights are rounded to nearest, with the arithmetic of the written file; inputs are rounded if the scheme does so.

Shapes: B windows per batch, T tokens, V vocabulary, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, isfinite
from typing import Any

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor, nn

from pipeline.compress.quantization.budget import UNCHANGED, Budget, scheme_of
from pipeline.compress.quantization.config import SCHEMES
from pipeline.compress.quantization.weights import compression_scheme, matrices_of, rounding_of, scale_of
from pipeline.models.folder.compressed_folder import rounds_inputs
from pipeline.models.gguf.write import encoded
from pipeline.models.unfused_experts import unfuse_experts

Show = Callable[[int, int], None]


@torch.inference_mode()
def measure_units(
    model: Any, budget: Budget, batches: Sequence[Tensor], *, dtype: torch.dtype, show: Show = lambda _done, _all: None
) -> dict[str, dict[str, float]]:
    """Measures unit -> choice -> mean KL(original || one unit changed) in nats over the positions of the batches.

    Args:
        model: a Hugging Face model in fp32, in evaluation mode; unchanged afterwards, but for unfused experts.
        budget: budget with the units and their choices.
        batches: token ids, int64 [B, T].
        dtype: dtype of the scales in a folder.
        show: function called with (choices measured, all choices).
    """
    unfuse_experts(model)
    matrices = matrices_of(model)
    expected = [log_probabilities(model, batch) for batch in batches]
    found: dict[str, dict[str, float]] = {}
    jobs = [(name, choice) for name, unit in budget.units.items() for choice in unit.bytes if choice != UNCHANGED]
    for done, (name, choice) in enumerate(jobs):
        layers = [matrices[each] for each in map(_module, budget.units[name].layers)]
        with changed(layers, choice, dtype):
            sums = [
                kl_of(log_p, log_probabilities(model, batch)) * batch.numel()
                for log_p, batch in zip(expected, batches, strict=True)
            ]
        found.setdefault(name, {})[choice] = sum(sums) / sum(batch.numel() for batch in batches)
        show(done + 1, len(jobs))
    return found


def _module(name: str) -> str:
    """Module name of a layer, or of a tensor in a folder."""
    return name.removesuffix(".weight")


@contextmanager
def changed(layers: Sequence[nn.Module], choice: str, dtype: torch.dtype) -> Iterator[None]:
    """Gives layers the quantized values of a choice, until the block ends.

    Args:
        layers: layers with a weight [O, I], or [I, O] for Conv1D.
        choice: a key of SCHEMES, or a type of ggml.
        dtype: dtype of the scales.
    """
    kept: list[tuple[Any, Tensor]] = [(layer, layer.get_parameter("weight").data) for layer in layers]
    handles = []
    try:
        for layer, weight in kept:
            layer.weight.data = rounded(weight, choice, dtype, transposed=_transposed(layer))
            activations = compression_scheme(scheme_of(choice)).input_activations if choice in SCHEMES else None
            if activations is not None:
                handles.append(layer.register_forward_pre_hook(rounds_inputs(activations)))
        yield
    finally:
        for layer, weight in kept:
            layer.weight.data = weight
        for handle in handles:
            handle.remove()


def rounded(weight: Any, choice: str, dtype: torch.dtype, *, transposed: bool = False) -> Tensor:
    """The weight as a reader of the stored file gets it: fp32, in its shape."""
    if choice not in SCHEMES:
        kind = GGMLQuantizationType[choice]
        rows = weight.T if transposed else weight
        back = torch.from_numpy(dequantize(encoded(rows.contiguous().numpy(), kind), kind)).reshape(rows.shape)
        return back.T if transposed else back
    scheme = scheme_of(choice)
    args = compression_scheme(scheme).weights
    assert args is not None
    scale = scale_of(weight, args, dtype).float()
    columns = scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    return rounding_of(scheme)(weight, columns)


def _transposed(layer: nn.Module) -> bool:
    """Whether a layer's weight is [I, O] (GPT-2's Conv1D)."""
    return type(layer).__name__ == "Conv1D"


def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    """Log-probabilities of the model, fp32 [B, T, V]."""
    found: Tensor = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    return found


def kl_of(log_p: Tensor, log_q: Tensor) -> float:
    """Mean of KL(p || q) over positions, summed over the vocabulary in fp64."""
    total = 0.0
    for one, other in zip(log_p, log_q, strict=True):  # a window at a time: [T, V] in fp64
        wide = one.double()
        total += float((wide.exp() * (wide - other.double())).sum(-1).mean())
    mean = total / len(log_p)
    return max(0.0, mean) if isfinite(mean) else inf
