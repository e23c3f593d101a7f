"""Padding ids that architectures compute with: RoBERTa's positions count the tokens that are not padding."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from foundation.errors import ConfigError


def give_padding_id(config: PretrainedConfig, end_of_text: int | None) -> None:
    """Makes end-of-text the padding id of an architecture that cannot compute without one; changes the config in place.

    As in transformers, the padding id's embedding is then a row of zeros that no gradient changes. Other architectures
    keep None, and their end-of-text is an ordinary token.
    """
    own = getattr(type(config), "pad_token_id", None)
    if config.pad_token_id is not None or end_of_text is None or own is None:
        return
    padded = copy.deepcopy(config)
    padded.pad_token_id = end_of_text
    if _fails(config) and not _fails(padded):
        config.pad_token_id = end_of_text


def check_padding_id(config: PretrainedConfig, *, field: str) -> None:
    """Replaces a negative padding id (in Llama's old folders: no padding id) by None; changes the config in place.

    torch counts a negative id from the end: the last token's embedding would never get a gradient.

    Args:
        config: config of the model.
        field: name of the id in an error.

    Raises:
        ConfigError: the id is beyond the vocabulary, so the embedding has no row for it.
    """
    padding, rows = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if not isinstance(padding, int) or not isinstance(rows, int):
        return
    if padding < 0:
        config.pad_token_id = None
    elif padding >= rows and not _builds(config):  # GPT-2 does not use the id, and accepts any
        why = f"the vocabulary has {rows} ids, and the embedding no row for it"
        raise ConfigError(field, padding, why=why, remedy="set it to null, which is no padding id, or to an id below")


def _builds(config: PretrainedConfig) -> bool:
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    except AssertionError:  # raised by torch for a padding id without a row
        return False
    except Exception:  # other errors of an architecture are reported where the model is built
        return True
    return True


def check_padded_positions(model: nn.Module, *, sequence_length: int) -> None:
    """Checks that positions which begin after the padding id, as RoBERTa's do, are enough for a sequence.

    Raises:
        ConfigError: the last positions of a sequence have no embedding.
    """
    for module in _padded_positions(model):
        needed = sequence_length + _before(model, module)
        if module.num_embeddings < needed:
            why = f"positions begin after the padding id, {module.padding_idx}: {sequence_length} need {needed} of them"
            remedy = f"use {needed} or more (or shorter sequences), or a tokenizer whose padding has a small id"
            raise ConfigError("model.config.max_position_embeddings", module.num_embeddings, why=why, remedy=remedy)


def longest_sequence(model: nn.Module) -> int | None:
    """Returns the longest sequence that a model can compute, in positions; None if its config sets no limit."""
    config: Any = model.config
    given = getattr(config, "max_position_embeddings", None) or None
    after_padding = [module.num_embeddings - _before(model, module) for module in _padded_positions(model)]
    return min([*after_padding, *([given] if given and given > 0 else [])], default=None)


def _before(model: nn.Module, positions: Any) -> int:
    """Rows before the first position, the padding row included; ProphetNet also needs a position after a sequence."""
    return int(positions.padding_idx) + 1 + bool(getattr(model.config, "ngram", 0))


def _padded_positions(model: nn.Module) -> list[Any]:
    """Returns the position embeddings that have a row for padding."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None
    ]


def _fails(config: PretrainedConfig) -> bool:
    """Whether a forward pass on the meta device fails for a reason other than the missing values of meta tensors."""
    try:
        with torch.device("meta"), torch.no_grad():
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
            model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    except (NotImplementedError, RuntimeError):
        return False
    except Exception:  # each architecture fails in its own way
        return True
    return False
