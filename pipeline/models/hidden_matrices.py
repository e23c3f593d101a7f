"""The hidden matrices of a Hugging Face model: parameters that are matrices within a layer, and their layouts.

They matter to optimizers that update a matrix as a whole (Muon). Hidden matrices are the weights of linear layers
within the decoder layers, and stacked experts [E, m, n], which are E matrices. Embeddings, the head, norms, biases,
routers, convolution kernels, decay rates of state-space layers, other tensors that are not weights of a linear layer,
and matrices with one row or one column are not hidden matrices.

A tensor that fuses several projections (q, k and v; gate and up) is several matrices. Their layout follows from the
projection's name and the widths in the config, or from its use in a tiny model (`gated_projections`); any other fused
tensor counts as one matrix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from pipeline.models.gated_projections import gated_layout
from pipeline.models.router_names import is_router
from pipeline.models.routers import find_routers


@dataclass(frozen=True)
class MatrixForm:
    """The matrices that a parameter consists of.

    Its rows (outputs) are `groups` repetitions of the same sequence of parts; the i-th parts of all groups form the
    i-th matrix. So concatenated q, k and v are one group of three parts; in GPT-NeoX, where they alternate from head to
    head, every head is a group.

    Attributes:
        shape: shape of the parameter: [m, n], or [E, m, n] for stacked experts.
        transposed: whether the parameter is stored as [inputs, outputs].
        parts: rows of each part of a group.
        groups: number of groups of rows.
        inputs_first: whether each part is stored as [inputs, outputs], one after another (DBRX).
    """

    shape: tuple[int, ...]
    parts: tuple[int, ...]
    transposed: bool = False
    groups: int = 1
    inputs_first: bool = False

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of every matrix in the parameter, or in one expert."""
        if self.inputs_first:
            return tuple((self.shape[-1], part) for part in self.parts)
        inputs = self.shape[-2] if self.transposed else self.shape[-1]
        return tuple((self.groups * part, inputs) for part in self.parts)

    @property
    def stacked(self) -> int:
        """Number of stacked experts; 1 without experts."""
        return math.prod(self.shape[:-2])

    def split(self, stored: Tensor) -> list[Tensor]:
        """Splits a stored tensor [..., m, n] into matrices [..., outputs, inputs]: views where they are contiguous."""
        rows = stored.mT if self.transposed else stored
        grouped = rows.unflatten(-2, (self.groups, -1)).split(list(self.parts), dim=-2)
        return [part.flatten(-3, -2).mT if self.inputs_first else part.flatten(-3, -2) for part in grouped]

    def write(self, matrices: list[Tensor], stored: Tensor) -> None:
        """Writes matrices into a stored tensor [..., m, n]: the inverse of `split`."""
        rows = stored.mT if self.transposed else stored
        grouped = rows.unflatten(-2, (self.groups, -1)).split(list(self.parts), dim=-2)
        for part, matrix in zip(grouped, matrices, strict=True):
            part.copy_((matrix.mT if self.inputs_first else matrix).unflatten(-2, (self.groups, -1)))


def hidden_matrices(model: nn.Module) -> dict[str, MatrixForm]:
    """Finds the hidden matrices of a model by parameter name, in the model's order.

    Args:
        model: a whole model, on any device: a sharded parameter no longer has its full shape.
    """
    layers = tuple(f"{n}." for n, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer))
    routers = {router.name for router in find_routers(model)}
    found: dict[str, MatrixForm] = {}
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        if name.startswith(layers) and owner not in routers and not is_router(owner) and min(parameter.shape) > 1:
            form = _form(model, name, tuple(parameter.shape))
            if form is not None:
                found[name] = form
    return found


def unknown_fused(forms: Mapping[str, MatrixForm]) -> list[str]:
    """Returns the names, without layer numbers, of projections that count as one matrix but seem to be several."""
    whole = [name for name, form in forms.items() if len(form.parts) == 1 and _FUSED_NAME.search(name)]
    return sorted({re.sub(r"^.*\.\d+\.", "", name) for name in whole})


_FUSED_NAME = re.compile(r"(qkv|query_key_value|gate_up|in_proj|c_attn|kv_[ab]_proj|input_linear)\w*(\.weight)?$")


def _form(model: nn.Module, name: str, shape: tuple[int, ...]) -> MatrixForm | None:
    owner_name, _, leaf = name.rpartition(".")
    owner: Any = model.get_submodule(owner_name)
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    if len(shape) == 2 and leaf == "weight" and isinstance(owner, nn.Linear | Conv1D):
        transposed = isinstance(owner, Conv1D)
        parent, _, projection = owner_name.rpartition(".")
        layout = _fused(projection, config, outputs=shape[1 if transposed else 0])
        gated = (
            None if transposed or len(layout[1]) > 1 else gated_layout(config, model.get_submodule(parent), projection)
        )
        if gated is not None:
            layout = gated[0], (gated[1],) * 2
    elif len(shape) == 3 and not leaf.endswith("bias") and _are_experts(owner):
        transposed = bool(getattr(owner, "is_transposed", False)) or config.model_type.startswith("llama4")
        outputs = shape[-1 if transposed else -2]
        interleaved = not getattr(owner, "is_concatenated", True)
        halves = leaf.startswith("gate_up")
        layout = (outputs // 2, (1, 1)) if interleaved and halves else _halves(outputs) if halves else (1, (outputs,))
    elif len(shape) == 2 and config.model_type == "dbrx" and _are_experts(owner):  # concatenated experts
        experts = (owner.ffn_hidden_size,) * owner.moe_num_experts
        return MatrixForm(shape, parts=experts, inputs_first=leaf == "w2")
    else:
        return None
    groups, parts = layout
    return MatrixForm(shape, parts, transposed, groups)


def _are_experts(module: nn.Module) -> bool:
    return hasattr(module, "is_transposed") or re.search(r"Experts|ExpertGLU", type(module).__name__) is not None


Layout = tuple[int, tuple[int, ...]]
"""Number of groups, and rows of each part of a group."""


def _fused(projection: str, config: Any, *, outputs: int) -> Layout:
    """Returns layout of a projection's matrices; one matrix if the projection is unknown or its widths do not fit."""
    for pattern, rule in _RULES:
        if re.fullmatch(pattern, f"{config.model_type}:{projection}"):
            groups, parts = rule(config, outputs)
            if groups * sum(parts) == outputs and min(parts) > 0:
                return groups, parts
    return 1, (outputs,)


def _halves(outputs: int) -> Layout:
    return 1, (outputs // 2,) * 2


def _thirds(outputs: int) -> Layout:
    return 1, (outputs // 3,) * 3


def attention_sizes(config: Any) -> tuple[int, int, int]:
    """(heads, key/value heads, head size) by the names that configs have for them."""
    heads = next(getattr(config, n) for n in ("num_attention_heads", "n_heads", "n_head") if hasattr(config, n))
    width = next(getattr(config, n) for n in ("hidden_size", "d_model", "n_embd") if hasattr(config, n))
    shared = (getattr(config, n, None) for n in ("num_key_value_heads", "num_kv_heads"))
    return heads, next((n for n in shared if n), heads), getattr(config, "head_dim", None) or width // heads


def _one_after_the_other(config: Any, outputs: int) -> Layout:
    heads, kv, size = attention_sizes(config)
    return (1, (heads * size, kv * size, kv * size)) if (heads + 2 * kv) * size == outputs else _thirds(outputs)


def _by_head(config: Any, outputs: int) -> Layout:
    heads = attention_sizes(config)[0]
    return heads, (outputs // heads // 3,) * 3


def _falcon(config: Any, outputs: int) -> Layout:
    heads, kv, size = attention_sizes(config)
    if config.new_decoder_architecture:  # query heads of one key head, the key, the value
        return kv, (heads // kv * size, size, size)
    return (1, (heads * size, size, size)) if config.multi_query else _by_head(config, outputs)


def _bigcode(config: Any, outputs: int) -> Layout:
    heads, _, size = attention_sizes(config)
    return (1, (heads * size, size, size)) if config.multi_query else _by_head(config, outputs)


def _dbrx(config: Any, outputs: int) -> Layout:
    heads, size = config.n_heads, config.d_model // config.n_heads
    shared = (outputs - heads * size) // 2
    return 1, (heads * size, shared, shared)


_RULES: tuple[tuple[str, Callable[[Any, int], Layout]], ...] = (
    (r".*:(gate_up_proj)", lambda _, outputs: _halves(outputs)),
    (r"granitemoe\w*:input_linear|jetmoe:kv_proj", lambda _, outputs: _halves(outputs)),
    (r"(mamba|falcon_mamba|jamba|zamba):in_proj", lambda _, outputs: _halves(outputs)),  # values, gate
    (r"lfm\d\w*:in_proj", lambda _, outputs: _thirds(outputs)),
    (r"gpt_bigcode:c_attn", _bigcode),
    (r".*:c_attn", lambda _, outputs: _thirds(outputs)),
    (r"falcon:query_key_value", _falcon),
    (r".*:query_key_value", _by_head),
    (r"minimax:qkv_proj", _by_head),
    (r"codegen:qkv_proj", lambda _, outputs: (4, (outputs // 12,) * 3)),
    (r"dbrx:Wqkv", _dbrx),
    (r".*:(qkv_proj|Wqkv)", _one_after_the_other),
    (
        r".*:in_proj_qkv",
        lambda c, _: (1, (*(c.linear_num_key_heads * c.linear_key_head_dim,) * 2, _values(c))),
    ),
    (
        r"qwen3_next:in_proj_qkvz",
        lambda c, _: (c.linear_num_key_heads, (*(c.linear_key_head_dim,) * 2, *(_values_of_key(c),) * 2)),
    ),
)
"""Pattern of `model_type:projection` -> rule; the first match applies. Source: the modules of transformers 5.23."""


def _values(config: Any) -> int:
    return int(config.linear_num_value_heads * config.linear_value_head_dim)


def _values_of_key(config: Any) -> int:
    return _values(config) // int(config.linear_num_key_heads)
