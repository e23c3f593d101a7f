"""Calibrated quantization, one decoder layer at a time: each gets the outputs of the quantized layers before it.

The host's memory holds the hidden states of all calibration windows, and the second moments of the inputs of one
decoder layer. The device holds the current layer.

Shapes: B windows per batch, T tokens, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from foundation.errors import DataError
from pipeline.compress.quantization.gptq import Rounding, gptq
from pipeline.compress.quantization.moments import SecondMoments
from pipeline.compress.quantization.signround import SignRound
from pipeline.compress.quantization.smoothing import Smoother

Scale = Callable[[nn.Linear], Tensor]
Progress = Callable[[Sequence[nn.Module]], Iterable[nn.Module]]


@dataclass(frozen=True)
class Method:
    """Steps that calibration applies to a decoder layer.

    Attributes:
        scale: function that returns the scales [O, G] of a linear layer.
        rounding: GPTQ's rounding to the numbers that the scheme stores; name -> rounding if layers have several
            schemes; None without GPTQ.
        smoother: smoothing, applied first; None for none.
        sign_round: SignRound, in place of GPTQ; None for no SignRound.
    """

    scale: Scale
    rounding: Rounding | Mapping[str, Rounding] | None = None
    smoother: Smoother | None = None
    sign_round: SignRound | None = None


class _ReachedError(Exception):
    """Raised when the first decoder layer is reached, to end the forward pass."""


@torch.no_grad()
def calibrate(
    model: nn.Module,
    names: Iterable[str],
    batches: Sequence[Tensor],
    *,
    method: Method,
    device: torch.device,
    progress: Progress = iter,
) -> dict[str, Tensor]:
    """Smooths decoder layers and rounds the weights of linear layers in place, by GPTQ or SignRound.

    Args:
        model: a Hugging Face model in fp32, in evaluation mode, on the CPU.
        names: names of the linear layers; those outside of the decoder layers (the head) are left unchanged.
        batches: token ids, int64 [B, T], all of one shape.
        method: steps applied to each layer.
        device: device on which layers are run.
        progress: wraps the iteration over decoder layers.

    Returns:
        Name -> scales of every layer that was rounded.
    """
    layers = decoder_layers(model)
    wanted = {id(module): name for name, module in model.named_modules() if name in set(names)}
    hidden, arguments = layer_inputs(model, layers, batches)
    found: dict[str, Tensor] = {}
    for number, layer in enumerate(progress(layers)):
        linear = {wanted[id(module)]: module for module in layer.modules() if id(module) in wanted}
        how: dict[str, Any] = {"method": method, "device": device, "last": number + 1 == len(layers)}
        scales, hidden = calibrate_layer(layer, linear, hidden, arguments[number], **how)
        found |= scales
    return found


@torch.no_grad()
def calibrate_layer(
    layer: nn.Module,
    linear: Mapping[str, nn.Module],
    hidden: Sequence[Tensor],
    arguments: dict[str, Any],
    *,
    method: Method,
    device: torch.device,
    last: bool = False,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Smooths and rounds the weights of one decoder layer in place; it is back on the CPU afterwards.

    Args:
        layer: decoder layer in fp32.
        linear: name -> linear layer, within `layer`, to round.
        hidden: input of the layer for every batch, fp32 [B, T, D] on the CPU.
        arguments: other arguments of the layer, the same for all batches.
        method: steps applied to the layer.
        device: device on which the layer is run.
        last: whether this is the last layer, whose output is not needed.

    Returns:
        Name -> scales of every layer that was rounded, and the layer's output for every batch; empty for the last.
    """
    layer.to(device)
    given = _moved(arguments, device)
    if method.smoother is not None:
        with method.smoother.observe(layer) as smooth:
            for states in hidden:
                _run(layer, states.to(device), given)
        smooth()
    found: dict[str, Tensor] = {}
    if method.sign_round is not None:
        modules = {name: module for name, module in linear.items() if isinstance(module, nn.Linear)}
        found = method.sign_round.fit(layer, modules, hidden, given, scale=method.scale, device=device)
    if method.rounding is not None:
        found = _round(layer, linear, hidden, given, method=method, device=device)
    made = [] if last else [_run(layer, states.to(device), given).cpu() for states in hidden]
    layer.cpu()
    return found, made


def _round(
    layer: nn.Module,
    linear: Mapping[str, nn.Module],
    hidden: Sequence[Tensor],
    given: dict[str, Any],
    *,
    method: Method,
    device: torch.device,
) -> dict[str, Tensor]:
    """Rounds linear layers in place by GPTQ, together if they have the same input; returns name -> scales."""
    moments = SecondMoments(device)
    with moments.observe(linear):
        for states in hidden:
            _run(layer, states.to(device), given)
    found: dict[str, Tensor] = {}
    for names, hessian in moments.pop():
        scales = {name: method.scale(_linear(linear[name])) for name in names}
        for alike, rounding in _by_rounding(method, scales):
            weights = [_linear(linear[name]).weight for name in alike]
            stacked = torch.cat(weights), torch.cat([scales[name].float() for name in alike])
            rounded = gptq(stacked[0], hessian, stacked[1], rounding=rounding)
            for weight, part in zip(weights, rounded.split([len(each) for each in weights]), strict=True):
                weight.copy_(part)
        found |= {name: scale.cpu() for name, scale in scales.items()}
    return found


def _by_rounding(method: Method, scales: Mapping[str, Tensor]) -> Iterator[tuple[list[str], Rounding]]:
    """Groups layers with the same rounding and the same number of scale groups."""
    assert method.rounding is not None
    found: dict[tuple[Rounding, int], list[str]] = {}
    for name, scale in scales.items():
        rounding = method.rounding[name] if isinstance(method.rounding, Mapping) else method.rounding
        found.setdefault((rounding, scale.shape[1]), []).append(name)
    for (rounding, _), names in found.items():
        yield names, rounding


def _linear(module: nn.Module) -> nn.Linear:
    assert isinstance(module, nn.Linear)
    return module


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a Hugging Face model, in their order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def layer_inputs(
    model: nn.Module, layers: Sequence[nn.Module], batches: Sequence[Tensor]
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """The first layer's input [B, T, D] for every batch, and each layer's other arguments, the same for all.

    Runs the decoder without its head, whose logits would be the largest tensor of all.

    Raises:
        DataError: layers get positional arguments beside hidden states, or arguments that differ between batches.
    """
    decoder: nn.Module = model.base_model  # type: ignore[assignment]
    arguments: list[dict[str, Any]] = []
    hidden: list[Tensor] = []

    def note(layer: nn.Module, positional: Any, given: dict[str, Any]) -> None:
        if any(value is not None for value in positional[1:]):
            raise _not_calibrated(layer, "other inputs than hidden states by position")
        arguments.append({name: value for name, value in given.items() if name != "hidden_states"})

    def stop(layer: nn.Module, positional: Any, given: dict[str, Any]) -> None:
        differ = [name for name, value in arguments[0].items() if not _same(value, given.get(name))]
        if differ:
            raise _not_calibrated(layer, f"{', '.join(differ)}, which differ from text to text")
        hidden.append(positional[0] if positional else given["hidden_states"])
        raise _ReachedError

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    decoder(input_ids=batches[0], use_cache=False)
    for handle in handles:
        handle.remove()
    handle = layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    for batch in batches:
        try:
            decoder(input_ids=batch, use_cache=False)
        except _ReachedError:
            continue
    handle.remove()
    return hidden, arguments


def _not_calibrated(layer: nn.Module, what: str) -> DataError:
    remedy = '"method": "rtn" without smoothing, which reads no text'
    return DataError(f"layers ({type(layer).__name__}) take {what}, and calibration hands on none\n  try: {remedy}")


def _same(first: Any, second: Any) -> bool:
    """Whether two arguments of a layer are equal; tensors are compared by value, other objects by type."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(value, second[key]) for key, value in first.items())
    return type(first) is type(second)


def _run(layer: nn.Module, states: Tensor, arguments: dict[str, Any]) -> Tensor:
    made = layer(states, **arguments)
    found: Tensor = made[0] if isinstance(made, tuple) else made
    return found


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(each, device) for each in value)
    if isinstance(value, dict):
        return {name: _moved(each, device) for name, each in value.items()}
    return value
