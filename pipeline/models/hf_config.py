"""Resolves the `model` section to a Hugging Face config object. Imports transformers, so it runs after the rules."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from headrace.base.errors import ConfigError, DataError
from headrace.base.section import suggest
from pipeline.config.model_rules import check_model_config
from pipeline.config.schema import ModelSection
from pipeline.models.layers import keep_layers

VOCAB_MULTIPLE = 64
"""A vocabulary size that is not given is rounded up to a multiple of this, to align the head's matrix products."""


def resolve_hf_config(section: ModelSection, *, tokenizer: dict[str, Any], sequence_length: int) -> PretrainedConfig:
    """The config of the model to train.

    Args:
        section: the validated `model` section.
        tokenizer: the dataset's tokenizer section: vocab_size, bos_id, eos_id, pad_id.
        sequence_length: T, which must not exceed the model's positions.

    Raises:
        ConfigError: an unknown architecture or key, or a vocabulary smaller than the dataset's tokenizer.
        DataError: `model.path` is not a Hugging Face folder.
    """
    if section.config is not None:
        config = _from_section(section.config, tokenizer, sequence_length)
    else:
        assert section.path is not None
        config = read_hf_config(section.path)
        if section.keep_layers is not None:
            config = keep_layers(config, section.keep_layers)
    if config.vocab_size < tokenizer["vocab_size"]:
        why = f"the dataset's tokenizer has {tokenizer['vocab_size']} ids"
        remedy = "use the tokenizer the model was made with, or leave model.config.vocab_size out"
        raise ConfigError("model.config.vocab_size", config.vocab_size, why=why, remedy=remedy)
    check_model_config(_shared_integers(config), sequence_length=sequence_length)
    if getattr(config, "is_decoder", True) is False:
        why = "it sees the tokens to its right, so predicting the next one means nothing"
        raise ConfigError("model.config.model_type", config.model_type, why=why, remedy="use a decoder, e.g. llama")
    return config


def read_hf_config(folder: str | Path) -> PretrainedConfig:
    """The config.json of a Hugging Face folder on disk.

    Raises:
        DataError: there is no such folder or it has no readable config.json.
    """
    if not (Path(folder) / "config.json").is_file():
        raise DataError(f"{folder}: not a Hugging Face folder (no config.json)\n  try: the path of an exported model")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (StrictDataclassError, OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{folder}/config.json cannot be read: {one_line(error)}") from None


def _from_section(given: dict[str, Any], tokenizer: dict[str, Any], sequence_length: int) -> PretrainedConfig:
    kind = given["model_type"]
    if kind not in CONFIG_MAPPING:
        near = suggest(kind, list(CONFIG_MAPPING))
        remedy = f"did you mean '{near}'?" if near else "use one that transformers knows, e.g. llama"
        raise ConfigError("model.config.model_type", kind, why="transformers has no such architecture", remedy=remedy)
    _refuse_unknown_keys(kind, given)
    vocabulary = -(-tokenizer["vocab_size"] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    derived = {
        "vocab_size": vocabulary,
        "bos_token_id": tokenizer.get("bos_id"),
        "eos_token_id": tokenizer.get("eos_id"),
        "pad_token_id": tokenizer.get("pad_id"),
    }
    if "max_position_embeddings" in known_keys(kind):
        derived["max_position_embeddings"] = max(2048, sequence_length)
    # an architecture may have two names for a key (GPT-2: n_positions, max_position_embeddings); the user's value wins
    aliases = CONFIG_MAPPING[kind].attribute_map
    fields = {k: v for k, v in given.items() if k != "model_type"}
    set_by_user = {aliases.get(key, key) for key in fields}
    derived = {key: value for key, value in derived.items() if aliases.get(key, key) not in set_by_user}
    try:
        return AutoConfig.for_model(kind, **derived, **fields)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        why = f"transformers refuses it: {one_line(error)}"
        raise ConfigError("model.config", given, why=why, remedy="correct the field it names") from None


def _refuse_unknown_keys(kind: str, given: dict[str, Any]) -> None:
    """Refuses unknown keys: transformers accepts them silently, so a typo would train a different model."""
    known = known_keys(kind)
    for key, value in given.items():
        if key not in known:
            near = suggest(key, sorted(known))
            remedy = f"did you mean '{near}'?" if near else f"see the {kind} config of transformers"
            raise ConfigError(f"model.config.{key}", value, why=f"{kind} has no such key", remedy=remedy)


def known_keys(kind: str) -> set[str]:
    """The keys that an architecture's config accepts, including aliases."""
    config_class = CONFIG_MAPPING[kind]
    signature = inspect.signature(config_class.__init__).parameters
    return {*signature, *config_class.attribute_map, "model_type"} - {"self", "kwargs"}


def one_line(error: Exception) -> str:
    """A library's exception in one line; of its cause if it has one, since transformers puts the reason there."""
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:300] or repr(cause)


def _shared_integers(config: PretrainedConfig) -> dict[str, Any]:
    keys = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("vocab_size", "max_position_embeddings"),
    )
    return {"model_type": config.model_type, **{k: getattr(config, k, None) for k in keys}}
