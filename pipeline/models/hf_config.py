"""Resolves the `model` section to a Hugging Face config object. Imports transformers, so it runs after the rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foundation.errors import ConfigError, DataError, refuse_all
from foundation.remote_folder import local_folder
from pipeline.config.family_keys import family, key_problems
from pipeline.config.rules.experts import CHOSEN, EXPERTS, GROUPS
from pipeline.config.rules.training import POSITIONS, check_model_config
from pipeline.config.sections.run import ModelSection
from pipeline.models.folder.model_folder import read_config
from pipeline.models.folder.text_part import TEXT_ALONE, text_is_nested
from pipeline.models.folder.weight_files import HfFields
from pipeline.models.layers import global_value, keep_layers
from pipeline.models.padding import check_padding_id, give_padding_id

DEFAULT_POSITIONS = 2048
"""Default of `max_position_embeddings`, unless the training sequence is longer."""

VOCAB_MULTIPLE = 64
"""Number to whose multiple a default vocabulary size is rounded up, to align the head's matrix products."""


def resolve_hf_config(
    section: ModelSection, *, tokenizer: dict[str, Any], sequence_length: int, changes: HfFields | None = None
) -> PretrainedConfig:
    """Makes the config of the model to train.

    Args:
        section: the validated `model` section.
        tokenizer: the dataset's tokenizer section: vocab_size, bos_id, eos_id, pad_id.
        sequence_length: T, which must not exceed the model's positions.
        changes: keys by which a stage's config differs from that of `model.path`.

    Raises:
        ConfigError: an architecture or key is unknown, or the vocabulary is smaller than the dataset's tokenizer or
            does not contain the padding id.
        DataError: `model.path` is not a Hugging Face folder.
    """
    if section.config is not None:
        config = _from_section(section.config, tokenizer, sequence_length)
        _refuse_several_modalities(config, folder=False)
        check_padding_id(config, field="model.config.pad_token_id")
        if "pad_token_id" not in section.config:
            give_padding_id(config, tokenizer.get("eos_id"))
    else:
        assert section.path is not None
        config = read_hf_config(section.path)
        if section.keep_layers is not None:
            _refuse_whole(section, config.model_type)
            config = keep_layers(config, section.keep_layers)
        _refuse_several_modalities(config, folder=True)
        config = _changed(config, changes or {})
    if config.vocab_size < tokenizer["vocab_size"]:
        why = f"the dataset's tokenizer has {tokenizer['vocab_size']} ids"
        field, remedy = "model.config.vocab_size", "leave it out: it is then taken from the tokenizer"
        if section.path is not None:  # its embedding has a fixed number of rows
            field = "model.path"
            why = f"{section.path} has {config.vocab_size} ids, and {why}"
            remedy = "prepare the data with the model's tokenizer: tokenizer.path of the corpus config"
        raise ConfigError(field, section.path or config.vocab_size, why=why, remedy=remedy)
    check_model_config(_shared_fields(config), sequence_length=sequence_length)
    return config


def _changed(config: PretrainedConfig, changes: HfFields) -> PretrainedConfig:
    """Returns a config with other values of some keys; objects inside it are merged key by key."""
    if not changes:
        return config
    refuse_all([*key_problems({"model_type": config.model_type, **changes}, legacy=False)])
    fields = {
        key: value for key, value in config.to_dict().items() if key not in ("model_type", "transformers_version")
    }
    for key, value in changes.items():
        before = fields.get(key)
        fields[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    try:
        return AutoConfig.for_model(config.model_type, **fields)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"transformers refuses it: {one_line(error)}"
        raise ConfigError("model.config", changes, why=why, remedy="correct the field it names") from None


def read_hf_config(folder: str | Path, *, dequantized: bool = False) -> PretrainedConfig:
    """Reads the config.json of a Hugging Face folder.

    Args:
        folder: path or URL of the folder.
        dequantized: whether weights of any quantization scheme are dequantized when they are read.

    Raises:
        DataError: transformers cannot load the folder without executing its code, config.json contradicts itself, or
            the weights are quantized (except fp8).
        ConfigError: the padding id is beyond the vocabulary.
    """
    folder = local_folder(folder)
    read_config(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (StrictDataclassError, OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{folder}/config.json cannot be read: {one_line(error)}") from None
    if dequantized:
        del config.quantization_config
    config = _text_part(_without_quantization(config, folder))
    check_padding_id(config, field=f"pad_token_id of {folder}/config.json")
    return config


def _text_part(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the decoder's config of a multimodal model if the decoder alone computes the same for text."""
    if config.model_type not in TEXT_ALONE:
        return config
    text = config.get_text_config(decoder=True)
    kind = TEXT_ALONE[config.model_type] or text.model_type
    others = ("model_type", "architectures", *(config.sub_configs if text is config else ()))
    fields = {key: value for key, value in text.to_dict().items() if key not in others}
    rope = fields.get("rope_parameters") or {}
    if kind != text.model_type:  # the other architecture has plain rotation
        fields["rope_parameters"] = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    if crossed := fields.pop("cross_attention_layers", None):  # Mllama: text passes by the layers that read images
        fields["num_hidden_layers"] -= len(crossed)
    alone = AutoConfig.for_model(kind, **fields)
    tied = getattr(config, "tie_word_embeddings", None)
    if tied is not None:  # the head belongs to the whole model
        alone.tie_word_embeddings = tied
    return alone


def _without_quantization(config: PretrainedConfig, folder: str | Path) -> PretrainedConfig:
    """Returns the config of the trained model: fp8 weights are multiplied by their scales when they are read.

    Raises:
        DataError: the weights are quantized in another way.
    """
    section = getattr(config, "quantization_config", None)
    if section is None:
        return config
    method = section.get("quant_method") if isinstance(section, dict) else None
    if method != "fp8":
        why = f"its weights are quantized ({method or 'by an unknown method'}), and training needs them in bf16 or fp32"
        raise DataError(f"{folder}: {why}\n  try: the model that it was quantized from")
    del config.quantization_config
    return config


def _refuse_whole(section: ModelSection, kind: str) -> None:
    """Refuses to keep some layers of a decoder whose multimodal model an export writes as a whole."""
    if section.extra_weights == "keep" and text_is_nested(local_folder(str(section.path)), kind):
        why = "the rest of the multimodal model in model.path, which an export keeps, fits all its layers"
        remedy = 'add "extra_weights": "drop": an export is then the decoder alone'
        raise ConfigError("model.keep_layers", list(section.keep_layers or ()), why=why, remedy=remedy)


def _from_section(given: HfFields, tokenizer: HfFields, sequence_length: int) -> PretrainedConfig:
    kind = given["model_type"]
    refuse_all([*key_problems(given)])
    known = family(kind)
    if known is not None and "backbone_hidden_size" in known.keys:
        why = "it drafts tokens for another model, whose hidden states it reads: it computes nothing from text alone"
        raise ConfigError("model.config.model_type", kind, why=why, remedy="use a model of text, e.g. gemma4_text")
    vocabulary = -(-tokenizer["vocab_size"] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    derived = {
        "vocab_size": vocabulary,
        "bos_token_id": tokenizer.get("bos_id"),
        "eos_token_id": tokenizer.get("eos_id"),
        "pad_token_id": tokenizer.get("pad_id"),
    }
    if known is not None and "max_position_embeddings" in known.keys:
        derived["max_position_embeddings"] = max(DEFAULT_POSITIONS, sequence_length)
    # an architecture may have two names for a key (GPT-2: n_positions, max_position_embeddings); the user's value wins
    aliases = CONFIG_MAPPING[kind].attribute_map
    fields = {k: v for k, v in given.items() if k != "model_type"}
    set_by_user = {aliases.get(key, key) for key in fields}
    derived = {key: value for key, value in derived.items() if aliases.get(key, key) not in set_by_user}
    try:
        return _made(kind, derived, fields)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        why = f"transformers refuses it: {one_line(error)}"
        raise ConfigError("model.config", given, why=why, remedy="correct the field it names") from None


def _made(kind: str, derived: HfFields, fields: HfFields) -> PretrainedConfig:
    """Makes the config; end-of-text replaces special tokens that an architecture requires and the tokenizer lacks."""
    try:
        return AutoConfig.for_model(kind, **derived, **fields)
    except StrictDataclassError:
        absent = [key for key, value in derived.items() if value is None]
        if not absent or derived.get("eos_token_id") is None:
            raise
        return AutoConfig.for_model(kind, **derived | dict.fromkeys(absent, derived["eos_token_id"]), **fields)


_OWN_LOOP = "train it with a loop of your own (docs/how-to/own-loop.md)"


def _refuse_several_modalities(config: PretrainedConfig, *, folder: bool) -> None:
    """Refuses a model of text and images or sounds: only its language model would get gradients.

    Args:
        config: config of the model.
        folder: whether the config belongs to `model.path`, whose weights fit no other architecture.

    Raises:
        ConfigError: the model is multimodal; names the `model_type` of its language model.
    """
    text = config.get_text_config(decoder=True)
    others = sorted(name for name in config.sub_configs if any(word in name for word in _OTHER_PARTS))
    if text.model_type == config.model_type and not others:
        return
    why = f"it has parts besides a decoder of text ({', '.join(others) or 'text_config'}), which text cannot train"
    alone = text.model_type != config.model_type and text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    remedy = f"use {text.model_type}" if alone and not folder else "use a model of text, e.g. llama"
    if folder:
        families = ", ".join(TEXT_ALONE)
        remedy = f"{_OWN_LOOP}, or a folder whose text part is trained alone ({families})"
    raise ConfigError("model.config.model_type", config.model_type, why=why, remedy=remedy)


_OTHER_PARTS = ("vision", "audio", "vq_config", "encoder", "patcher")
"""Words in the names of sub-configs that do not belong to the decoder."""


def known_keys(kind: str) -> frozenset[str]:
    """Returns the keys that an architecture's config accepts, with aliases (`attribute_map`), and those layers read."""
    found = family(kind)
    assert found is not None, kind
    return found.keys | found.optional


def one_line(error: Exception) -> str:
    """Formats a library's exception, or its cause if any, in one line: transformers puts the reason into the cause."""
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:300] or repr(cause)


def _shared_fields(config: PretrainedConfig) -> dict[str, Any]:
    """Returns the fields that all decoders have, and those that `check_experts` knows, by their common names."""
    keys = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("vocab_size", "max_position_embeddings"),
    )
    every = config.to_dict()
    others = {*EXPERTS, *CHOSEN, *GROUPS, "topk_group", "zero_expert_num", "rope_parameters"}
    shared = {k: v for k, v in every.items() if k in others or k.endswith("_config")}
    shared |= {k: global_value(config, k) for k in keys}
    positions = next((name for name in POSITIONS if getattr(config, name, None)), None)
    return {"model_type": config.model_type, **shared, **({positions: getattr(config, positions)} if positions else {})}


def config_key(config: Any) -> str:
    """Returns all values of a Hugging Face config as text, a key for caches."""
    return json.dumps(config.to_dict(), sort_keys=True, default=str)


def config_from(key: str) -> PretrainedConfig:
    """Makes the config of a `config_key`."""
    fields = json.loads(key)
    config: PretrainedConfig = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    return config
