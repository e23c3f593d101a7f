"""Finds the outputs of projections that become the queries and keys of each head of a Hugging Face model.

To multiply the attention logits of a head by a factor, the weights of its queries and its keys are multiplied by powers
of the factor whose exponents sum to 1 (QK-Clip: Kimi Team 2025, Kimi K2, arXiv:2507.20534, section 2.1):

- separate or fused projections (q_proj and k_proj, qkv_proj, c_attn, ...): the square root for both;
- latent attention (DeepSeek-V3): the square root for the part without rotary position, in queries (q_proj or q_b_proj)
  and keys (kv_b_proj); the factor itself for the rotated part of the queries, whose keys all heads share.

Query heads that share a key head have one factor, so that the key can be multiplied by its root. Megatron-LM does the
same (`Attention.clip_qk` uses the largest logit of the group). Heads are therefore numbered by key heads here.

Shapes: H heads, K key heads, d head size, R outputs of a projection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.models.hidden_matrices import MatrixForm, attention_sizes, hidden_matrices

_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "att_proj")
_HALF = 0.5

NORM = re.compile(r"(q|k|qk|query|key)_?(layer)?_?(norm|ln|layernorm)")
"""Pattern of the names of query and key norms in an attention module."""


@dataclass(frozen=True)
class HeadRows:
    """Outputs of a projection's weight or bias that become queries or keys.

    Attributes:
        shape: shape of the parameter.
        dim: dim of the parameter along which the outputs lie.
        heads: int64 [R], the key head of every output; 0 if it has none.
        powers: fp32 [R], exponent of the key head's factor that multiplies the output; 0 for unchanged outputs.
    """

    shape: tuple[int, ...]
    dim: int
    heads: Tensor
    powers: Tensor

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class AttentionHeads:
    """The outputs of an attention module's projections.

    Attributes:
        name: name of the module.
        key_heads: number of key heads, K.
        rows: parameter name -> its outputs.
    """

    name: str
    key_heads: int
    rows: dict[str, HeadRows]


def attention_heads(model: nn.Module) -> list[AttentionHeads]:
    """Finds the attention modules of a model whose projections are known, in the model's order.

    Args:
        model: a whole model, on any device: a sharded parameter no longer has its full shape.
    """
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    names, forms = {id(parameter): name for name, parameter in model.named_parameters()}, hidden_matrices(model)
    found: list[AttentionHeads] = []
    for name, module in model.named_modules():
        outputs = list(_outputs_of(name, module, config, forms))
        rows = {
            names[id(parameter)]: HeadRows(tuple(parameter.shape), _dim(projection, parameter), heads, powers)
            for projection, heads, powers in outputs
            for parameter in projection.parameters(recurse=False)
        }
        if rows:
            found.append(AttentionHeads(name, 1 + max(int(heads.max()) for _, heads, _ in outputs), rows))
    return found


def norms_of_heads(module: nn.Module) -> list[str]:
    """Returns the names of the norms of queries and keys in an attention module."""
    return [name for name, _ in module.named_children() if NORM.fullmatch(name.lower())]


Outputs = tuple[nn.Module, Tensor, Tensor]
"""A projection, with the key head and the power of each of its outputs."""


def _outputs_of(name: str, module: nn.Module, config: Any, forms: Mapping[str, MatrixForm]) -> Iterator[Outputs]:
    if _is_linear(module, "kv_b_proj"):
        yield from _latent(module, config)
    elif _is_linear(module, "q_proj") and _is_linear(module, "k_proj"):
        yield from _separate(module, config, forms.get(f"{name}.q_proj.weight"))
    else:
        for fused in _FUSED:
            form = forms.get(f"{name}.{fused}.weight") if _is_linear(module, fused) else None
            if form is not None:
                yield from _fused(module, getattr(module, fused), form, config)


def _dim(projection: nn.Module, parameter: Tensor) -> int:
    return parameter.ndim - 1 if isinstance(projection, Conv1D) else 0


def _is_linear(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(module, name, None), nn.Linear | Conv1D)


def _outputs(projection: Any) -> int:
    return int(projection.weight.shape[1 if isinstance(projection, Conv1D) else 0])


def _separate(module: Any, config: Any, form: MatrixForm | None) -> Iterator[Outputs]:
    size = getattr(module, "head_dim", None) or attention_sizes(config)[2]
    gates = (
        1 if form is None else len(form.parts)
    )  # 2 if each head's query is followed by its gate, which keeps power 0
    if _outputs(module.q_proj) % (size * gates) or _outputs(module.k_proj) % size:
        return
    if form is not None and gates > 1 and form.parts != (size, size):
        return
    heads, shared = _outputs(module.q_proj) // (size * gates), _outputs(module.k_proj) // size
    if heads % shared == 0:
        for projection, each, parts in ((module.q_proj, heads, gates), (module.k_proj, shared, 1)):
            of_head = torch.arange(each).repeat_interleave(size * parts) // (each // shared)
            yield projection, of_head, torch.tensor([_HALF] * size + [0.0] * (size * (parts - 1))).repeat(each)


def _latent(module: Any, config: Any) -> Iterator[Outputs]:
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes: list[Any] = [getattr(module, each, None) or getattr(config, each, 0) for each in names]
    nope, rope, value = sizes
    query = next((getattr(module, each) for each in ("q_b_proj", "q_proj") if _is_linear(module, each)), None)
    if query is None or not nope or _outputs(query) % (nope + rope):
        return
    heads = _outputs(query) // (nope + rope)
    if _outputs(module.kv_b_proj) == heads * (nope + value):
        for projection, second, power in ((query, rope, 1.0), (module.kv_b_proj, value, 0.0)):
            powers = torch.tensor([_HALF] * nope + [power] * second).repeat(heads)
            yield projection, torch.arange(heads).repeat_interleave(nope + second), powers


def _fused(module: Any, projection: Any, form: MatrixForm, config: Any) -> Iterator[Outputs]:
    """Yields the outputs of a projection that fuses queries, keys and values."""
    size = next((n for n in (getattr(module, each, None) for each in ("head_dim", "head_size")) if n), None)
    size = size or attention_sizes(config)[2]
    if len(form.parts) != 3:
        return
    numbers = torch.arange(_outputs(projection)).unflatten(0, (form.groups, -1))
    query, key, _ = (part.flatten() for part in numbers.split(list(form.parts), dim=1))
    if len(query) % size or len(key) % size or len(query) % len(key):
        return
    heads, powers = torch.zeros(numbers.numel(), dtype=torch.int64), torch.zeros(numbers.numel())
    for outputs in (query, key):
        heads[outputs] = torch.arange(len(outputs)) // (size * len(outputs) // len(key))
        powers[outputs] = _HALF
    yield projection, heads, powers
