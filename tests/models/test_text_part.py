"""The decoder of a model of several modalities is trained alone, and computes what the whole does for text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, Phi4MultimodalForCausalLM

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.checkpoint.export.export import export
from pipeline.checkpoint.export.find import find_checkpoint
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.quantization.rules import prepare
from pipeline.compress.quantization.trained import model_folder
from pipeline.config.sections.run import ModelSection
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.stored_values import FromSafetensors
from pipeline.models.folder.loading import load_model
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.folder.text_part import TEXT_ALONE
from pipeline.models.hf_config import read_hf_config, resolve_hf_config
from tests.models.architectures import COMMON
from tests.models.test_extra_weights import train_a_step
from tests.sweeps.families import tiny_fields

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT: dict[str, Any] = {**COMMON, "head_dim": 8, "max_position_embeddings": 64, **_IDS}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "num_heads": 2,
    "patch_size": 4,
    **dict.fromkeys(("embed_dim", "intermediate_size"), 16),
    **dict.fromkeys(("hidden_size", "out_hidden_size"), 32),
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
QWEN_TEXT: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
}


PHI_VISION = {**VISION, "num_hidden_layers": 2, "image_size": 28, "crop_size": 28, "patch_size": 14}
PHI_AUDIO = {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2} | dict.fromkeys(
    ("nemo_conv_channels", "ext_pw_out_channel", "depthwise_separable_out_channel"), 16
)
SMALL_IMAGE = {**VISION, "image_size": 8, "patch_size": 4, "vision_output_dim": 16}
LLAMA4_VISION = {**SMALL_IMAGE, "projector_input_dim": 16, "projector_output_dim": 16}
MLLAMA_VISION = {**SMALL_IMAGE, "vision_output_dim": 32, "num_global_layers": 1, "attention_heads": 2} | {
    "max_num_tiles": 1,
    "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1]],
}


def whole_config(kind: str, vocabulary: int) -> Any:
    """Config of a tiny model; those of this year have the text of `tests/sweeps/families.py`."""
    base = CONFIG_MAPPING[kind]()
    inner = base.get_text_config().model_type
    text, ids = {**TEXT, "vocab_size": vocabulary, "model_type": inner}, {"image_token_id": vocabulary - 1}
    vision: dict[str, Any] = dict(QWEN_VISION)
    if kind == "phi4_multimodal":
        vision, audio = PHI_VISION | ids, PHI_AUDIO | {"audio_token_id": vocabulary - 2}
        return CONFIG_MAPPING[kind](**{**text, "vision_config": vision, "audio_config": audio})
    if kind == "mllama":
        # the last rows of the embedding, behind the vocabulary, are those of images
        text, vision, ids = {**text, "cross_attention_layers": [1]}, MLLAMA_VISION, {"image_token_index": vocabulary}
    elif kind.startswith(("qwen3_5", "gemma4", "llama4")):
        text = {**tiny_fields(inner), "vocab_size": vocabulary}
        vision = LLAMA4_VISION if kind == "llama4" else VISION if kind.startswith("gemma4") else vision
        vision = {**vision, "out_hidden_size": 64} if kind.startswith("qwen3_5") else vision
    elif kind.startswith("qwen"):
        text |= QWEN_TEXT
    else:
        size: Any = [8, 8] if kind == "internvl" else 8
        patch: Any = [4, 4] if kind == "internvl" else 4
        vision = {**VISION, "image_size": size, "patch_size": patch, "model_type": base.vision_config.model_type}
    tied = kind.startswith("gemma")
    return CONFIG_MAPPING[kind](**{"text_config": text, "vision_config": vision, **ids, "tie_word_embeddings": tied})


def whole_model(kind: str, vocabulary: int = 64) -> Any:
    """A tiny one with random weights."""
    torch.manual_seed(0)
    config = whole_config(kind, vocabulary)
    if kind == "phi4_multimodal":
        model: Any = Phi4MultimodalForCausalLM(config)
    else:
        model = AutoModelForImageTextToText.from_config(config)
    for name, parameter in model.named_parameters():
        if not name.endswith(("A_log", "dt_bias")):
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


def trained(kind: str, tokens: Path, work: Path, **section: Any) -> str:
    """Trains the text of a multimodal folder, work/whole, for a step, and returns what the run said."""
    whole_model(kind, vocabulary=512).save_pretrained(work / "whole")
    (work / "whole/preprocessor_config.json").write_text("{}")
    return train_a_step(tokens, work, path=str(work / "whole"), **section)


_SLOW = pytest.mark.integration
_ALL = [pytest.param(kind, marks=[] if kind in ("qwen3_5", "mllama") else [_SLOW]) for kind in TEXT_ALONE]


@pytest.mark.parametrize("kind", _ALL)
@torch.no_grad()
def test_an_export_is_the_multimodal_model_with_the_trained_decoder(kind: str, tokens: Path, tmp_path: Path) -> None:
    # Llama 4 scales queries by their positions, for which headrace's own attention has no way
    section = {"attn_implementation": "eager"} if kind == "llama4" else {}
    said = trained(kind, tokens, tmp_path, **section)
    assert "an export has the other parts as they were" in said
    export(find_checkpoint(tmp_path / "run"), tmp_path / "model")
    before, after = (all_tensors(tmp_path / name) for name in ("whole", "model"))
    assert before.keys() == after.keys()
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    outside = {name for name in before if any(word in name for word in ("vis", "audio", "projector", "connector"))}
    assert outside <= same
    changed = before.keys() - same
    assert any("embed_tokens" in name for name in changed)
    assert any("layers.2." in name or "layers.3." in name for name in changed)
    kinds: Any = Phi4MultimodalForCausalLM if kind == "phi4_multimodal" else AutoModelForImageTextToText
    model, info = kinds.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (tmp_path / "model/preprocessor_config.json").is_file()
    ids = torch.arange(1, 33)[None]
    alone = load_model(tmp_path / "model")
    assert torch.allclose(model.eval()(input_ids=ids).logits, alone(input_ids=ids).logits, atol=1e-5)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_the_decoder_is_exported_as_a_model_of_text_where_the_rest_is_dropped(tokens: Path, tmp_path: Path) -> None:
    said = trained("gemma3", tokens, tmp_path, extra_weights="drop", keep_layers=[0, 2])
    assert "its decoder (gemma3_text) is trained, and exported alone" in said
    export(find_checkpoint(tmp_path / "run"), tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(exported).__name__ == "Gemma3ForCausalLM"
    section = ModelSection(path=str(tmp_path / "whole"), keep_layers=(0, 2))
    with pytest.raises(ConfigError, match='"extra_weights": "drop"'):
        resolve_hf_config(section, tokenizer={"vocab_size": 64}, sequence_length=32)


def test_of_a_run_the_decoder_is_quantized_alone_and_of_a_folder_none(tokens: Path, tmp_path: Path) -> None:
    trained("qwen3_vl", tokens, tmp_path)
    data = {"path": str(tokens), "sequence_length": 32}
    config = {"model": str(tmp_path / "run"), "output": str(tmp_path / "small"), "scheme": "W8A16", "data": data}
    with model_folder(parse(QuantizeConfig, config)) as folder:
        assert folder is not None
        assert ModelFolder.open(folder).config["model_type"] == "qwen3"
        prepare(parse(QuantizeConfig, {**config, "consumers": ["transformers"]}), folder=folder)
    with pytest.raises(ConfigError, match="--extra-weights drop"):
        prepare(parse(QuantizeConfig, {**config, "model": str(tmp_path / "whole")}))


def test_a_folder_whose_decoder_is_not_trained_alone_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    fields = CONFIG_MAPPING["aya_vision"]().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError) as caught:
        resolve_hf_config(ModelSection(path=str(tmp_path)), tokenizer={"vocab_size": 64}, sequence_length=32)
    text = str(caught.value)
    assert "own-loop.md" in text
    assert all(kind in text for kind in TEXT_ALONE)
    assert "use cohere2" not in text  # whose weights would be drawn anew
