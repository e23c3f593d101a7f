"""Makes FSDP2 gather the weights of fp8 products in fp8: half of bf16's bytes in messages and in gathered weights.

A shard is wrapped in a tensor class of torchao, from which FSDP2 gets the values to send. All ranks round with one
scale per weight, from the largest value of all shards. One all-reduce per step computes the scales of all weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.config.sections.run import Fp8Section
from pipeline.engines.parallel.decoder import Decoder


def gather_in_fp8(decoder: Decoder, section: Fp8Section, *, shards: int) -> None:
    """Wraps the weights of a decoder on meta, before sharding, if the config enables gathering in fp8.

    Args:
        decoder: the decoder, after `apply_fp8`.
        section: the config's `fp8`.
        shards: number of shards of each weight. Weights that do not divide equally are gathered in bf16.
    """
    if not (section.enabled and section.fsdp_all_gather):
        return
    from pipeline.engines.parallel.fp8_products import Float8Scaling, Fp8Linear, Fp8RowwiseLinear  # noqa: PLC0415

    names = {id(parameter): name for name, parameter in decoder.parameters_by_name().items()}
    for module in list(decoder.modules()):
        if isinstance(module, (Fp8Linear, Fp8RowwiseLinear)) and module.weight.shape[0] % shards == 0:
            assert isinstance(module.scaling, Float8Scaling)
            wrapped = module.scaling.gathered_in_fp8(module.weight.data)
            decoder.set_parameter(names[id(module.weight)], nn.Parameter(wrapped, module.weight.requires_grad))


def wrapped_like(shard: Tensor, example: Tensor) -> Tensor:
    """Wraps a shard in the class of `example`, in the same memory."""
    if not is_wrapped(example):
        return shard
    kind: Any = type(example)
    wrapped: Tensor = kind(shard, example._linear_mm_config, example._dtype)  # type: ignore[attr-defined]
    return wrapped


def unwrapped(shard: Tensor) -> Tensor:
    """Returns the values of a shard as a plain tensor in the same memory."""
    inner: Tensor = getattr(shard, "_tensor", shard)
    return inner


def is_wrapped(shard: Tensor) -> bool:
    """Whether a shard is gathered in fp8."""
    return hasattr(shard, "fsdp_pre_all_gather")


@torch.no_grad()
def refresh_scales(parameters: Iterable[nn.Parameter]) -> None:
    """Computes the scales of all weights gathered in fp8. Collective; must be called whenever weights have changed.

    Args:
        parameters: FSDP2's parameters, in the same order on every rank.
    """
    weights = [each for each in parameters if isinstance(each, DTensor) and is_wrapped(each._local_tensor)]
    if not weights:
        return
    from torchao.float8.float8_utils import amax_to_scale  # noqa: PLC0415

    shards: list[Any] = [weight._local_tensor for weight in weights]
    largest = torch.stack([unwrapped(shard).abs().max() for shard in shards])
    mesh = weights[0].device_mesh
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group(mesh.ndim - 1))
    for shard, scale in zip(shards, amax_to_scale(largest, shards[0]._dtype).unbind(), strict=True):
        shard._precomputed_scale = scale
