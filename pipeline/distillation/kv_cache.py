"""What a student keeps of every token while it generates, found by a forward pass of one token on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from headrace.base.errors import ConfigError
from pipeline.models.attention import ATTENTION_NAME
from pipeline.parallel.decoding import decoding_batch

_FIELD = "distill.on_policy.kv_cache"


def cache_bytes_per_token(model: nn.Module) -> int:
    """Bytes of the keys and values of one token in all layers, without parallelism.

    Args:
        model: a Hugging Face causal language model on meta.

    Raises:
        ConfigError: its layers do not keep keys and values of every token.
    """
    one = torch.zeros((1, 1), dtype=torch.int64, device="meta")
    cache = DynamicCache()
    batch = decoding_batch(one, one, None, first=0, cache=cache, multiple=1)
    causal: Any = model
    own = {"context": batch.context(next(model.parameters()).dtype)} if _own_attention(model) else {}
    kind = causal.config.model_type
    if getattr(causal, "_is_stateful", False):
        raise _refused(f"{kind} keeps a state that is not one of keys and values")
    try:
        with torch.no_grad():
            causal(input_ids=one, position_ids=one, **batch.cache_arguments(), **own)
    except Exception as error:
        raise _refused(f"a forward pass of {kind} with a cache fails: {error}") from error
    kept: list[Any] = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    if len(kept) != causal.config.num_hidden_layers or any(layer.keys.shape[-2] != 1 for layer in kept):
        raise _refused(f"of {causal.config.num_hidden_layers} layers of {kind}, {len(kept)} keep keys and values")
    return sum(each.numel() * each.element_size() for layer in kept for each in (layer.keys, layer.values))


def check_kv_cache(model: nn.Module, *, mask_documents: bool) -> None:
    """Refuses a cache that an architecture or an attention cannot have.

    Raises:
        ConfigError: see `cache_bytes_per_token`; or documents are told apart by transformers, from positions.
    """
    if mask_documents and not _own_attention(model):
        raise _refused("this attention tells documents apart by the positions of one pass (data.mask_documents)")
    cache_bytes_per_token(model)


def _own_attention(model: nn.Module) -> bool:
    config: Any = model.config
    return bool(config._attn_implementation == ATTENTION_NAME)


def _refused(why: str) -> ConfigError:
    remedy = "set it to false: every new token is then a forward pass over all before it"
    return ConfigError(_FIELD, True, why=why, remedy=remedy)
