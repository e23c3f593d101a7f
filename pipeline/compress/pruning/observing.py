"""Hooks that add up activations while a model runs; see the table in `importance`.

They see this process's values: all windows of its batches or its positions of them, all features or its shard. The
inside of fused experts has no module to hook: it is computed a second time from the module's inputs.

Shapes: B windows of a batch, T positions of this process, D residual channels, F FFN channels, E experts, N = B T.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.engines.parallel.stages import Absent
from pipeline.models.decoder_layers import decoder_layers

_FFN, _HEADS = ("mlp.down_proj", "mlp.c_proj"), ("self_attn.o_proj", "attn.c_proj")
_NORM = re.compile(
    r"^(?:model\.norm|model\.layers\.\d+\.\w+_layernorm|transformer\.ln_f|transformer\.h\.\d+\.ln_[12])$"
)


class Observer:
    """Sums over the tokens of the forward passes during `watching`.

    Args:
        device: device of the sums.

    Attributes:
        sums: key -> sum, fp64.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=device))
        self._rows, self._of = 1, 1

    def begin(self, *, rows: int, of: int) -> None:
        """Sets how many windows of the coming batch count: the first `rows` out of `of`. The others are padding."""
        self._rows, self._of = rows, of

    def add(self, key: str, value: Tensor) -> None:
        """Adds to a sum."""
        self.sums[key] = self.sums[key] + value

    def real(self, values: Tensor) -> Tensor:
        """The part of [B, ...] or [N, ...] that is not padding."""
        return values if self._rows == self._of else values[: len(values) // self._of * self._rows]

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Hooks all modules whose values are summed, until the block ends."""
        handles = []
        for name, module in model.named_modules():
            if _NORM.match(name) and not isinstance(module, Absent):
                handles.append(module.register_forward_hook(self._norm_hook(name, centred=_is_layer_norm(module))))
        for number, layer in decoder_layers(model).items():
            handles.append(layer.register_forward_hook(self._influence_hook(number), with_kwargs=True))
            for name, module in layer.named_modules():
                place = f"layers.{number}"
                if name in _FFN:
                    handles.append(module.register_forward_pre_hook(self._input_hook(f"{place}.ffn")))
                elif name in _HEADS:
                    handles.append(module.register_forward_pre_hook(self._input_hook(f"{place}.heads")))
                elif is_fused_experts(module):
                    handles.append(module.register_forward_pre_hook(self._experts_hook(f"{place}.experts")))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _add_moments(self, key: str, values: Tensor) -> None:
        """Adds sums of |x| and x^2 over all dims but the last."""
        rows = values.reshape(-1, values.shape[-1]).float()
        self.add(f"{key}.abs", rows.abs().sum(0, dtype=torch.float64))
        self.add(f"{key}.square", rows.square().sum(0, dtype=torch.float64))

    def _input_hook(self, key: str) -> Callable[..., None]:
        def hook(module: nn.Module, positional: tuple[Tensor, ...]) -> None:
            inputs = self.real(positional[0])
            first, features = feature_offset(module, inputs.shape[-1])
            self._add_moments(key, F.pad(inputs, (first, features - first - inputs.shape[-1])))

        return hook

    def _norm_hook(self, name: str, *, centred: bool) -> Callable[..., None]:
        def hook(_module: nn.Module, positional: tuple[Tensor, ...], out: Tensor) -> None:
            self._add_moments(f"{name}.out", self.real(out))
            before = self.real(positional[0]).reshape(-1, out.shape[-1]).float()
            before = before - before.mean(-1, keepdim=True) if centred else before
            self.add(f"{name}.in.square", before.square().sum(0, dtype=torch.float64))

        return hook

    def _influence_hook(self, number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, positional: tuple[Any, ...], given: dict[str, Any], out: Any) -> None:
            before, after = (self.real(each).double() for each in (states_of(positional, given), _first(out)))
            cosine = F.cosine_similarity(before, after, dim=-1)
            self.add(f"layers.{number}.influence", (1 - cosine).sum().view(1))

        return hook

    def _experts_hook(self, key: str) -> Callable[..., None]:
        def hook(module: Any, positional: tuple[Tensor, ...]) -> None:
            states, chosen, weights = (self.real(each) for each in positional[:3])
            for name, value in sums_of_experts(module, states, chosen, weights).items():
                self.add(f"{key}.{name}", value)

        return hook


def sums_of_experts(module: Any, states: Tensor, chosen: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Sums of a fused module's experts, each over the tokens routed to it, fp64.

    Args:
        module: module with `gate_up_proj` [E, 2 F, D] and `down_proj` [E, D, F].
        states: inputs of the module [N, D].
        chosen: experts of each token [N, K].
        weights: routing weights of these experts [N, K].
    """
    experts, width = module.down_proj.shape[0], module.down_proj.shape[2]
    sums = {f"ffn.{name}": states.new_zeros(experts, width, dtype=torch.float64) for name in ("abs", "square")}
    sums |= {name: states.new_zeros(experts, dtype=torch.float64) for name in ("tokens", "mass")}
    for expert in range(experts):
        token, place = torch.where(chosen == expert)
        gate, up = F.linear(states[token], module.gate_up_proj[expert]).chunk(2, dim=-1)
        inner = (module.act_fn(gate) * up).float()
        sums["ffn.abs"][expert] = inner.abs().sum(0, dtype=torch.float64)
        sums["ffn.square"][expert] = inner.square().sum(0, dtype=torch.float64)
        sums["tokens"][expert] = token.numel()
        sums["mass"][expert] = weights[token, place].sum(dtype=torch.float64)
    return sums


def is_fused_experts(module: nn.Module) -> bool:
    """Whether a module holds all experts of a layer as parameters [E, ...]."""
    parts = (getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None))
    return all(isinstance(part, nn.Parameter) and len(getattr(part, "ds_shape", part.shape)) == 3 for part in parts)


@contextmanager
def left_out(layer: nn.Module | None) -> Iterator[None]:
    """Makes a layer return its input, until the block ends; None if another process has the layer."""
    if layer is None:
        yield
        return

    def hook(_module: nn.Module, positional: tuple[Any, ...], given: dict[str, Any], out: Any) -> Any:
        states = states_of(positional, given)
        return (states, *out[1:]) if isinstance(out, tuple) else states

    handle = layer.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def states_of(positional: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
    """Finds the hidden states among a decoder layer's arguments."""
    states: Tensor = positional[0] if positional else given["hidden_states"]
    return states


def feature_offset(module: nn.Module, features: int) -> tuple[int, int]:
    """First input feature of this process's shard of a layer, and the total number of features."""
    group = getattr(module, "group", None)  # layers in tensor-parallel shards have one
    if group is None:
        return 0, features
    return dist.get_rank(group) * features, dist.get_world_size(group) * features


def _first(out: Any) -> Tensor:
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first


def _is_layer_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm)
