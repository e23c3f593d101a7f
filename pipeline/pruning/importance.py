"""Importance by activations: sums over calibration tokens, in fp64, that any number of processes add up.

Every sum is over tokens. Each data-parallel rank runs its own windows (window i on rank i mod their number), and
tensor-parallel ranks see other features or other positions of the same ones, so that one all-reduce makes the sums of
all. What is summed, by key:

| key | shape | summed over tokens |
|---|---|---|
| `layers.N.ffn.abs`, `.square` | [F] | of the input of the FFN's second matrix |
| `layers.N.experts.ffn.abs`, `.square` | [E, F] | the same of each expert, over the tokens it gets |
| `layers.N.experts.tokens`, `.mass` | [E] | tokens, and routing weights |
| `layers.N.heads.abs`, `.square` | [H x head size] | of the input of the output projection |
| `NORM.out.abs`, `NORM.out.square`, `NORM.in.square` | [D] | of the output and the input of a norm |
| `layers.N.influence` | [1] | 1 - cosine of the layer's input and output |
| `layers.N.without` | [1] | loss without the layer, nats |
| `tokens` | [1] | 1 |

Source of the choice of sums: Muralidharan et al. 2024, Minitron (arXiv:2407.14679), section 2.2; block influence: Men
et al. 2024, ShortGPT (arXiv:2403.03853), section 3.2.

Shapes: B windows, T tokens, D residual channels, F FFN channels, E experts, H heads.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.data.loader import IGNORE, MicroBatch
from pipeline.pruning.sharded import feature_offset

Sums = dict[str, Tensor]
Forward = Callable[[MicroBatch], Tensor]
"""Runs a batch; its summed loss in nats."""

_FFN, _HEADS = ("mlp.down_proj", "mlp.c_proj"), ("self_attn.o_proj", "attn.c_proj")
_NORM = re.compile(r"^(?:model\.norm|model\.layers\.\d+\.\w+_layernorm)$")


@torch.no_grad()
def gather(
    model: nn.Module,
    batches: Iterable[MicroBatch],
    *,
    device: torch.device,
    forward: Forward | None = None,
    depth_loss: bool = False,
    tp: int = 1,
) -> Sums:
    """Sums over the tokens of this process's batches.

    Args:
        model: a Hugging Face model in evaluation mode on `device`.
        batches: of this process.
        device: where the batches go.
        forward: runs the model, where that takes more than calling it.
        depth_loss: run each batch once more without each layer.
        tp: processes that run the same batches.

    Returns:
        Key -> fp64 on the CPU, as in the module's table.
    """
    sums: Sums = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=device))

    def add(key: str, value: Tensor) -> None:
        sums[key] = sums[key] + value

    layers, run = decoder_layers(model), forward or partial(_plain, model)
    for batch in (each.to(device) for each in batches):
        with _observed(model, layers, add):
            run(batch)
        add("tokens", torch.tensor([batch.input_ids.numel() / tp], dtype=torch.float64, device=device))
        for number, layer in layers.items() if depth_loss else ():
            with _left_out(layer):
                add(f"layers.{number}.without", run(batch).double().view(1) / tp)
    return {key: value.cpu() for key, value in sums.items()}


def decoder_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Index -> decoder layer."""
    return dict(enumerate(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)))


def add_up(sums: Mapping[str, Tensor]) -> Sums:
    """The sums of all processes, by one all-reduce in fp64; collective. All processes have the same keys."""
    keys = sorted(sums)
    flat = torch.cat([sums[key].reshape(-1) for key in keys])
    dist.all_reduce(flat)
    parts = flat.split([sums[key].numel() for key in keys])
    return {key: part.view_as(sums[key]) for key, part in zip(keys, parts, strict=True)}


def _plain(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Summed loss in nats, fp64; transformers makes the document mask of positions that begin anew."""
    given = {} if batch.positions is None else {"position_ids": batch.positions}
    logits = model(input_ids=batch.input_ids, use_cache=False, **given).logits
    losses = [
        F.cross_entropy(one.float(), row, reduction="none", ignore_index=IGNORE)
        for one, row in zip(logits, batch.labels, strict=True)
    ]
    return torch.stack(losses).sum(dtype=torch.float64)


Add = Callable[[str, Tensor], None]


@contextmanager
def _observed(model: nn.Module, layers: Mapping[int, nn.Module], add: Add) -> Iterator[None]:
    """Hooks on everything that is summed."""
    handles = []
    for name, module in model.named_modules():
        if _NORM.match(name):
            handles.append(module.register_forward_hook(_norm_hook(name, add)))
    for number, layer in layers.items():
        handles.append(layer.register_forward_hook(_influence_hook(number, add), with_kwargs=True))
        for name, module in layer.named_modules():
            place = f"layers.{number}"
            if name in _FFN:
                handles.append(module.register_forward_pre_hook(_input_hook(f"{place}.ffn", add)))
            elif name in _HEADS:
                handles.append(module.register_forward_pre_hook(_input_hook(f"{place}.heads", add)))
            elif is_fused_experts(module):
                handles.append(module.register_forward_pre_hook(_experts_hook(f"{place}.experts", add)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_fused_experts(module: nn.Module) -> bool:
    """Whether a module holds all experts of a layer as parameters [E, ...]."""
    parts = (getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None))
    return all(isinstance(part, nn.Parameter) and part.ndim == 3 for part in parts)


def _add_moments(add: Add, key: str, values: Tensor) -> None:
    """Sums of |x| and x^2 over all dims but the last."""
    rows = values.reshape(-1, values.shape[-1]).float()
    add(f"{key}.abs", rows.abs().sum(0, dtype=torch.float64))
    add(f"{key}.square", rows.square().sum(0, dtype=torch.float64))


def _input_hook(key: str, add: Add) -> Callable[..., None]:
    def hook(module: nn.Module, positional: tuple[Tensor, ...]) -> None:
        first, features = feature_offset(module, positional[0].shape[-1])
        _add_moments(add, key, F.pad(positional[0], (first, features - first - positional[0].shape[-1])))

    return hook


def _norm_hook(name: str, add: Add) -> Callable[..., None]:
    def hook(_module: nn.Module, positional: tuple[Tensor, ...], out: Tensor) -> None:
        _add_moments(add, f"{name}.out", out)
        add(f"{name}.in.square", positional[0].reshape(-1, out.shape[-1]).float().square().sum(0, dtype=torch.float64))

    return hook


def _influence_hook(number: int, add: Add) -> Callable[..., None]:
    def hook(_module: nn.Module, positional: tuple[Any, ...], given: dict[str, Any], out: Any) -> None:
        before, after = _states(positional, given), out[0] if isinstance(out, tuple) else out
        cosine = F.cosine_similarity(before.double(), after.double(), dim=-1)
        add(f"layers.{number}.influence", (1 - cosine).sum().view(1))

    return hook


def _states(positional: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
    states: Tensor = positional[0] if positional else given["hidden_states"]
    return states


def _experts_hook(key: str, add: Add) -> Callable[..., None]:
    """The fused module computes what is inside of its experts in one function: that part is computed here again."""

    def hook(module: Any, positional: tuple[Tensor, ...]) -> None:
        states, chosen, weights = positional[:3]
        experts, width = module.down_proj.shape[0], module.down_proj.shape[2]
        sums = {name: states.new_zeros(experts, width, dtype=torch.float64) for name in ("abs", "square")}
        counts = {name: states.new_zeros(experts, dtype=torch.float64) for name in ("tokens", "mass")}
        for expert in range(experts):
            token, place = torch.where(chosen == expert)
            gate, up = F.linear(states[token], module.gate_up_proj[expert]).chunk(2, dim=-1)
            inner = (module.act_fn(gate) * up).float()
            sums["abs"][expert] = inner.abs().sum(0, dtype=torch.float64)
            sums["square"][expert] = inner.square().sum(0, dtype=torch.float64)
            counts["tokens"][expert] = token.numel()
            counts["mass"][expert] = weights[token, place].sum(dtype=torch.float64)
        for name, value in (sums | counts).items():
            add(f"{key}.ffn.{name}" if name in sums else f"{key}.{name}", value)

    return hook


@contextmanager
def _left_out(layer: nn.Module) -> Iterator[None]:
    """The layer gives back what it gets."""

    def hook(_module: nn.Module, positional: tuple[Any, ...], given: dict[str, Any], out: Any) -> Any:
        states = _states(positional, given)
        return (states, *out[1:]) if isinstance(out, tuple) else states

    handle = layer.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
