"""Pre-flight check that a student can generate with a key/value cache, on a tiny model of its architecture; cache size.

The check refuses a model whose logits, computed token by token, differ from those of a single pass. Such a model's
layers keep a state other than keys and values, or it separates documents by means other than the given mask. The check
takes a fraction of a second on the CPU, before the process group is initialized.

Shapes: B = 1, T = 16 positions, V = 32 ids.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from foundation.errors import ConfigError
from pipeline.engines.parallel.architecture_trial import TOLERANCE, random_model
from pipeline.engines.parallel.decoder import Decoder, DecoderLayout, parameter_owners
from pipeline.engines.parallel.decoding import decoding_batch
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.hf_config import one_line
from pipeline.models.resize.shrink import shrink

_V, _T, _PROMPT = 32, 16, 7
_BOUNDARY = 3
"""Position within the prompt at which a second document begins."""
_MULTIPLE = 2
"""Number that divides the positions of a padded pass, so that the cache is cropped."""


def check_kv_cache(model: nn.Module, *, mask_documents: bool, sequence_length: int) -> None:
    """Refuses a key/value cache where an architecture or its attention does not support it.

    Args:
        model: a Hugging Face causal language model on meta.
        mask_documents: whether prompts hold several documents that do not see each other.
        sequence_length: positions of a prompt and its continuation together.

    Raises:
        ConfigError: logits with a cache differ from logits without it.
    """
    why = kv_cache_problem(model, mask_documents=mask_documents, sequence_length=sequence_length)
    if why is not None:
        remedy = "set it to false: every new token is then a forward pass over all before it"
        raise ConfigError("distill.on_policy.kv_cache", True, why=why, remedy=remedy)


def kv_cache_problem(model: nn.Module, *, mask_documents: bool, sequence_length: int) -> str | None:
    """Tells why an architecture or its attention supports no cache; None if it does (see `check_kv_cache`)."""
    config: Any = model.config
    assert isinstance(config, PretrainedConfig)
    kind, attention = config.model_type, config._attn_implementation
    try:
        tiny = shrink(config, divide=1, layers=2, vocab_size=_V, lengths=(sequence_length, _T))
        small = random_model(tiny, attention=attention)
        layout = DecoderLayout(own_attention=attention == ATTENTION_NAME)
        decoder = Decoder(small.eval(), layout, parameter_owners(small))
        whole, cached = (_logits(decoder, cached=each, documents=mask_documents) for each in (False, True))
    except Exception as error:  # each architecture fails in its own way
        return f"generating with a key/value cache fails on a tiny {kind}: {one_line(error)}"
    if bool((whole - cached).abs().max() > TOLERANCE * whole.abs().max()):
        return f"with a key/value cache the logits of a tiny {kind} are others than without"
    return None


def cache_bytes_per_token(model: nn.Module) -> int | None:
    """Measures the bytes of a token's keys and values in all layers, without parallelism, in the model's dtype.

    It runs a forward pass on meta without experts, since torch's grouped product accepts only bf16 there.

    Args:
        model: a Hugging Face causal language model on meta.

    Returns:
        Bytes; None where the pass fails.
    """
    copied: Any = copy.deepcopy(model)
    for module in copied.modules():
        if type(module).__name__.endswith("Experts"):
            module.forward = lambda hidden, *_args, **_kwargs: hidden
    one, cache = torch.zeros((1, 1), dtype=torch.int64, device="meta"), DynamicCache()
    batch = decoding_batch(one, one, None, first=0, cache=cache, multiple=1)
    own = {"context": batch.context(torch.float32)} if copied.config._attn_implementation == ATTENTION_NAME else {}
    try:
        with torch.no_grad():
            copied(input_ids=one, position_ids=one, **batch.cache_arguments(), **own)
    except Exception:  # each architecture fails in its own way
        return None
    layers: list[Any] = cache.layers
    kept: list[Tensor] = [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(each.numel() * each.element_size() for each in kept)


@torch.no_grad()
def _logits(decoder: Decoder, *, cached: bool, documents: bool) -> Tensor:
    """Computes logits [T - prompt + 1, V] from the prompt's last token on, in one pass or token by token."""
    ids = torch.randint(_V, (1, _T), generator=torch.Generator().manual_seed(0))
    place, border = torch.arange(_T)[None], _BOUNDARY if documents else 0
    positions, numbers = torch.where(place < border, place, place - border), (place >= border).int()
    cache = DynamicCache() if cached else None
    done, found = 0, []
    for end in range(_PROMPT, _T + 1) if cached else (_T,):
        batch = decoding_batch(
            ids[:, done:end],
            positions[:, done:end],
            numbers[:, :end] if documents else None,
            first=done,
            cache=cache,
            multiple=_MULTIPLE,
        )
        found.append(decoder.logits(batch.input_ids, batch)[0, : end - done])
        if cache is not None:
            cache.crop(end - done - batch.input_ids.shape[1])
            done = end
    return torch.cat([found[0][_PROMPT - 1 :], *found[1:]])
