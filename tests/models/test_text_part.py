"""The decoder of a model of several modalities is trained alone, and computes what the whole does for text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from foundation.errors import ConfigError
from pipeline.config.sections.run import ModelSection
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.stored_values import FromSafetensors
from pipeline.models.folder.text_part import TEXT_ALONE
from pipeline.models.hf_config import read_hf_config, resolve_hf_config
from tests import warm
from tests.conftest import launch, tiny_config, write_config
from tests.support import output_of

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "embed_dim": 16,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
QWEN_TEXT: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
}


def whole_model(kind: str, vocabulary: int = 64) -> Any:
    """A tiny one with random weights."""
    base = CONFIG_MAPPING[kind]()
    text = {**TEXT, "vocab_size": vocabulary, "model_type": base.get_text_config().model_type}
    if kind.startswith("qwen"):
        text, vision = {**text, **QWEN_TEXT}, dict(QWEN_VISION)
    else:
        size: Any = [8, 8] if kind == "internvl" else 8
        patch: Any = [4, 4] if kind == "internvl" else 4
        model_type = base.vision_config.model_type
        vision = {**VISION, "image_size": size, "patch_size": patch, "model_type": model_type}
    fields = {"text_config": text, "vision_config": vision, "image_token_id": vocabulary - 1}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        CONFIG_MAPPING[kind](**fields, tie_word_embeddings=kind == "gemma3")
    )
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    model.tie_weights()
    return model.eval()


def decoder_of(folder: Path) -> Any:
    model = build_meta(read_hf_config(folder), dtype=torch.float32, attn_implementation="sdpa")
    materialize(model, FromSafetensors(folder, model=model), device=torch.device("cpu"))
    return model.eval()


@pytest.mark.parametrize("kind", TEXT_ALONE)
@torch.no_grad()
def test_the_decoder_of_a_folder_of_several_modalities_gives_its_logits(kind: str, tmp_path: Path) -> None:
    whole = whole_model(kind)
    whole.save_pretrained(tmp_path)
    ids = torch.arange(1, 33)[None]
    expected = whole(input_ids=ids).logits
    assert expected.std() > 0.1
    assert torch.equal(decoder_of(tmp_path)(input_ids=ids).logits, expected)


@torch.no_grad()
def test_the_names_of_transformers_5_are_read_as_the_published_ones(tmp_path: Path) -> None:
    whole = whole_model("gemma3")
    whole.save_pretrained(tmp_path)
    file, new = tmp_path / "model.safetensors", "model.language_model."
    tensors = {name.replace("language_model.model.", new): tensor for name, tensor in load_file(file).items()}
    assert any(name.startswith(new) for name in tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    ids = torch.arange(1, 33)[None]
    assert torch.equal(decoder_of(tmp_path)(input_ids=ids).logits, whole(input_ids=ids).logits)


def test_the_decoder_is_trained_and_exported_as_a_model_of_text(tokens: Path, tmp_path: Path) -> None:
    whole_model("gemma3", vocabulary=512).save_pretrained(tmp_path / "whole")
    config = tiny_config(tokens, tmp_path / "run", model={"path": str(tmp_path / "whole")}, engine="torch")
    config["run"]["steps"] = 1
    config.pop("scheduler")
    said = launch("train.py", write_config(tmp_path / "c.json", config))
    assert "its decoder (gemma3_text) is trained and exported alone" in " ".join(said.split())
    output_of(warm.run("-m", "pipeline", "export", tmp_path / "run", tmp_path / "model"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(exported).__name__ == "Gemma3ForCausalLM"


def test_a_folder_whose_decoder_is_not_trained_alone_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    fields = CONFIG_MAPPING["aya_vision"]().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError) as caught:
        resolve_hf_config(ModelSection(path=str(tmp_path)), tokenizer={"vocab_size": 64}, sequence_length=32)
    text = str(caught.value)
    assert "own-loop.md" in text
    assert all(kind in text for kind in TEXT_ALONE)
    assert "use cohere2" not in text  # whose weights would be drawn anew
