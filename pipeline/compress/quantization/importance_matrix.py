"""Importance matrix of a GGUF quantization: the mean square of every input of every matrix, on calibration text.

Rounding w to q makes the error E[((q - w) x)^2] in a layer's output. With uncorrelated inputs it is the sum over inputs
of (q - w)^2 E[x^2], so E[x^2] is the weight of a rounding error. llama.cpp's types use it in the least squares that
choose their scales (`ggml_quantize_chunk`). It is the diagonal of GPTQ's second moments.

Shapes: B windows per batch, T tokens, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.compress.quantization.weights import matrices_of
from pipeline.models.unfused_experts import unfuse_experts

Show = Callable[[int, int], None]
Importance = Mapping[str, npt.NDArray[np.float32]]
"""Name of a matrix in the model's folder -> mean square of its inputs, float32 [I]."""

_LEAST = 1e-6
"""Smallest weight, as a fraction of a layer's mean: an input that was always 0 still counts a little."""


@torch.inference_mode()
def measure_importance(
    model: Any,
    names: Iterable[str],
    batches: Sequence[Tensor],
    *,
    device: torch.device,
    show: Show = lambda _done, _all: None,
) -> Importance:
    """Measures the importance matrix by running the model over text.

    Args:
        model: a Hugging Face model in evaluation mode; its experts are unfused afterwards.
        names: names of tensors in its folder. The result lacks tensors that are not a matrix of a linear layer, experts
            to which no token is routed, and matrices whose inputs are all 0.
        batches: token ids, int64 [B, T].
        device: device on which the model is run.
        show: function called with (batches run, all batches).
    """
    unfuse_experts(model)
    model.to(device)
    sums: dict[str, Tensor] = {}
    tokens: dict[str, int] = {}

    def observe(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, given: tuple[Tensor, ...]) -> None:
            rows = given[0].reshape(-1, given[0].shape[-1]).float()
            total = rows.square().sum(0, dtype=torch.float64)
            sums[name] = sums[name] + total if name in sums else total
            tokens[name] = tokens.get(name, 0) + len(rows)

        return hook

    matrices = _matrices(model)
    handles = [matrices[name].register_forward_pre_hook(observe(name)) for name in map(str, names) if name in matrices]
    for done, batch in enumerate(batches):
        model(input_ids=batch.to(device), use_cache=False)
        show(done + 1, len(batches))
    for handle in handles:
        handle.remove()
    # with weights of 0 alone every number would become 0
    return {name: _mean(total, tokens[name]) for name, total in sums.items() if total.any()}


def _matrices(model: Any) -> dict[str, nn.Module]:
    """Name of a matrix in the folder -> its layer, which multiplies inputs by it."""
    return {f"{name}.weight": each for name, each in matrices_of(model).items() if not isinstance(each, nn.Embedding)}


def _mean(total: Tensor, tokens: int) -> npt.NDArray[np.float32]:
    mean = total / tokens
    found: npt.NDArray[np.float32] = mean.clamp(min=float(mean.mean()) * _LEAST).float().cpu().numpy()
    return found
