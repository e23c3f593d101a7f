"""Loading weights from safetensors, resolving the model config, layer selection, and parameter and FLOP counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, MixtralConfig

from foundation.directory import Manifest
from foundation.errors import ConfigError, DataError
from pipeline.checkpoint.export.trained_model import trained_config
from pipeline.config.sections.run import ModelSection
from pipeline.models.construction.initial_values import InitByName
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.rectangle import Rectangle
from pipeline.models.construction.stored_values import FromSafetensors
from pipeline.models.count import measure
from pipeline.models.hf_config import read_hf_config, resolve_hf_config
from pipeline.models.layers import attention_widths, keep_layers, original_name
from pipeline.models.padding import check_padded_positions
from pipeline.models.routers import has_experts
from pipeline.run.prepare import described

TOKENIZER: dict[str, Any] = {"vocab_size": 300, "bos_id": None, "eos_id": 0, "pad_id": None}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def resolve(section: dict[str, Any], sequence_length: int = 64) -> Any:
    return resolve_hf_config(ModelSection(**section), tokenizer=TOKENIZER, sequence_length=sequence_length)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = resolve({"config": LLAMA})
    model = build_meta(config, dtype=torch.float32, attn_implementation="sdpa")
    materialize(model, InitByName(model, seed=0), device=torch.device("cpu"))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def model_of(folder: Path) -> nn.Module:
    config = AutoConfig.from_pretrained(folder)
    return build_meta(config, dtype=torch.float32, attn_implementation="sdpa")


def test_saved_weights_are_loaded_unchanged(folder: Path) -> None:
    values = FromSafetensors(folder, model=model_of(folder))
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(values.value(name), tensor)


def test_a_box_of_a_saved_weight_is_that_part_of_it(folder: Path) -> None:
    values = FromSafetensors(folder, model=model_of(folder))
    for name, tensor in load_file(folder / "model.safetensors").items():
        box = Rectangle.full(tensor.shape).rows(3, 4)
        assert torch.equal(values.value(name, box=box), tensor[3:7])
        half = Rectangle((*box.offsets[:-1], box.offsets[-1] + 1), (*box.sizes[:-1], box.sizes[-1] // 2))
        found = values.value(name, box=half)
        assert torch.equal(found, tensor[half.slices])
        assert found.untyped_storage().nbytes() == 4 * half.numel  # nothing holds the file


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_only_the_bytes_of_a_box_are_read(tmp_path: Path) -> None:
    config = resolve({"config": {**LLAMA, "hidden_size": 1024, "num_hidden_layers": 1, "vocab_size": 1 << 20}})
    model = build_meta(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    config.save_pretrained(tmp_path)
    sparse_weights(tmp_path / "model.safetensors", model)  # 4 GiB, of which the disk has nothing
    values, name = FromSafetensors(tmp_path, model=model), "model.embed_tokens.weight"
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak; see proc(5)
    assert values.value(name, box=Rectangle((1 << 19, 512), (64, 512))).shape == (64, 512)
    assert _status("VmHWM") - before < 64 * 2**20
    values.value(name, box=Rectangle((1 << 19, 0), (1 << 15, 1024)))
    assert _status("VmHWM") - before > 64 * 2**20  # the peak shows what is read


def sparse_weights(file: Path, model: nn.Module) -> None:
    """A safetensors file of zeros in bf16, with holes in place of the zeros."""
    header, end = dict[str, Any](), 0
    for name, parameter in model.named_parameters():
        begin, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def test_missing_unexpected_and_misshapen_tensors_are_refused(folder: Path) -> None:
    file, model = folder / "model.safetensors", model_of(folder)
    original = load_file(file)
    first = next(iter(original))
    save_file({k: v for k, v in original.items() if k != first}, file)
    with pytest.raises(DataError, match=rf"missing \(1\): {first}"):
        FromSafetensors(folder, model=model)
    save_file({**original, "stray": torch.zeros(1)}, file)
    with pytest.raises(DataError, match=r"unexpected \(1\): stray"):
        FromSafetensors(folder, model=model)
    save_file({**original, first: torch.zeros(3, 3)}, file)
    with pytest.raises(DataError, match=r"has shape \(3, 3\)"):
        FromSafetensors(folder, model=model)


def test_a_truncated_file_and_an_empty_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    model, file = model_of(folder), folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    for path, words in ((folder, "truncated"), (tmp_path, "no safetensors")):
        with pytest.raises(DataError, match=words):
            FromSafetensors(path, model=model)


def test_kept_layers_load_the_weights_of_their_original_layers(folder: Path) -> None:
    config = keep_layers(AutoConfig.from_pretrained(folder), [0, 3])
    model = build_meta(config, dtype=torch.float32, attn_implementation="sdpa")
    rename = original_name([0, 3])
    values = FromSafetensors(folder, model=model, rename=rename, partial=True)
    original = load_file(folder / "model.safetensors")
    assert torch.equal(values.value("model.layers.1.mlp.up_proj.weight"), original["model.layers.3.mlp.up_proj.weight"])
    assert torch.equal(values.value("model.norm.weight"), original["model.norm.weight"])


@pytest.mark.parametrize("layers", [[4], [0, 0], [1, 2, 3, 9]])
def test_invalid_layer_selections_are_refused(folder: Path, layers: list[int]) -> None:
    with pytest.raises(ConfigError, match="layers 0 to 3"):
        keep_layers(AutoConfig.from_pretrained(folder), layers)


def test_the_vocabulary_size_follows_from_the_tokenizer_and_a_smaller_one_is_refused() -> None:
    assert resolve({"config": LLAMA}).vocab_size == 320  # 300, up to a multiple of 64
    with pytest.raises(ConfigError, match="the dataset's tokenizer has 300 ids"):
        resolve({"config": {**LLAMA, "vocab_size": 299}})


def test_a_key_that_only_the_layers_read_is_known_and_changes_them() -> None:
    sizes = {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    section = ModelSection.model_validate({"config": {**sizes, "num_hidden_layers": 1, "head_dim": 32}})
    config = resolve_hf_config(section, tokenizer={"vocab_size": 128}, sequence_length=32)
    model = build_meta(config, dtype=torch.float32, attn_implementation="sdpa")
    assert model.get_parameter("model.layers.0.self_attn.q_proj.weight").shape == (4 * 32, 64)
    typo = ModelSection.model_validate({"config": {**sizes, "head_dims": 32}})
    with pytest.raises(ConfigError, match="did you mean 'head_dim'"):
        resolve_hf_config(typo, tokenizer={"vocab_size": 128}, sequence_length=32)


def test_a_misspelt_model_key_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'num_hidden_layers'"):
        resolve({"config": {**LLAMA, "num_hiden_layers": 2}})
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        resolve({"config": {**LLAMA, "model_type": "lama"}})


def test_a_key_given_by_its_alias_overrides_the_default() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}
    assert resolve({"config": {**gpt2, "n_positions": 96}}).n_positions == 96
    assert resolve({"config": gpt2}).n_positions == 2048
    with pytest.raises(ConfigError, match="max_position_embeddings 16"):
        resolve({"config": {**gpt2, "n_positions": 16}})
    with pytest.raises(ConfigError, match="num_hidden_layers = -2"):
        resolve({"config": {**gpt2, "n_layer": -2}})


@pytest.mark.parametrize("wrong", [{"rms_norm_eps": "1e-5"}, {"tie_word_embeddings": "yes"}])
def test_a_model_key_of_a_wrong_type_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        resolve({"config": {**LLAMA, **wrong}})


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("gemma3", r"(?s)vision_config.*use gemma3_text"),  # of several modalities: with its language model
        ("gemma4_assistant", "drafts tokens for another model"),
    ],
)
def test_a_model_that_is_no_language_model_is_refused(model_type: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve({"config": {"model_type": model_type}})


_GROUPS = {"num_key_value_heads": 2, "head_dim": 8}


def test_a_special_token_that_an_architecture_insists_on_is_end_of_text_where_the_tokenizer_has_none() -> None:
    config = resolve({"config": {"model_type": "cwm", "hidden_size": 32, "num_attention_heads": 4, **_GROUPS}})
    assert config.bos_token_id == config.eos_token_id == TOKENIZER["eos_id"]


@pytest.mark.parametrize("given", [{"max_seq_len": 32}, {}])
def test_a_sequence_longer_than_mpts_positions_is_refused(given: dict[str, Any]) -> None:
    model = {"model_type": "mpt", "d_model": 32, "n_heads": 4, "n_layers": 2, **given}
    with pytest.raises(ConfigError, match="raise max_seq_len"):
        resolve({"config": model}, sequence_length=33 if given else 4096)


def test_a_parameter_whose_initialization_reads_another_one_is_drawn_with_it() -> None:
    model = build_meta(
        resolve(
            {"config": {"model_type": "rwkv", "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}}
        ),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    values = InitByName(model, seed=0)
    values.check()
    decay = values.value("rwkv.blocks.1.attention.time_decay")
    assert decay.tolist() == sorted(decay.tolist())
    assert decay[0] < -4  # transformers' formula begins at -5


def test_a_parameter_that_neither_transformers_nor_a_constructor_sets_is_refused() -> None:
    model = build_meta(resolve({"config": LLAMA}), dtype=torch.float32, attn_implementation="eager")
    model.model.layers[0].mlp.register_parameter("scale", nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(ConfigError, match=r"does not set .*mlp\.scale"):
        materialize(model, InitByName(model, seed=0), device=torch.device("cpu"))


SMALL_HEADS = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}


def test_a_parameter_or_buffer_that_only_its_constructor_sets_has_the_constructors_value() -> None:
    config = resolve({"config": {"model_type": "apertus", **SMALL_HEADS, "num_key_value_heads": 2}})
    model = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    materialize(model, InitByName(model, seed=0), device=torch.device("cpu"))
    activation = model.model.layers[2].mlp.act_fn
    # xIELU (arXiv:2411.13010): softplus(alpha_p) = 0.8, beta + softplus(alpha_n) = 0.8, beta = 0.5
    assert torch.nn.functional.softplus(activation.alpha_p).item() == pytest.approx(0.8)
    assert torch.nn.functional.softplus(activation.alpha_n).item() == pytest.approx(0.3)
    assert activation.beta.item() == 0.5
    assert activation.eps.item() == pytest.approx(-1e-6)


def test_a_parameter_that_a_constructor_draws_is_a_function_of_seed_name_and_shape() -> None:
    def drawn(seed: int, layers: int, *, name: str = "transformer.h.1.attn.c_attn.weight") -> torch.Tensor:
        fields = {"model_type": "openai-gpt", "n_embd": 32, "n_layer": layers, "n_head": 4}
        model = build_meta(resolve({"config": fields}), dtype=torch.float32, attn_implementation="eager")
        torch.manual_seed(layers)  # the state of the process's generator has no influence
        return InitByName(model, seed=seed).value(name)

    value = drawn(0, 2)
    assert value.std().item() == pytest.approx(0.02, rel=0.1)  # GPT-1's; 3072 values: standard error 1.3 %
    assert torch.equal(value, drawn(0, 3))
    assert not torch.equal(value, drawn(1, 2))
    assert not torch.equal(value, drawn(0, 2, name="transformer.h.0.attn.c_attn.weight"))


def test_a_parameter_is_initialized_by_the_nearest_model_that_contains_it() -> None:
    fields = {"model_type": "xlstm", "hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2}
    model = build_meta(resolve({"config": fields}), dtype=torch.float32, attn_implementation="eager")
    InitByName(model, seed=0).check()  # the model around it has no `embeddings`, which its `_init_weights` sets


def test_a_buffer_that_a_module_around_its_owner_sets_is_filled() -> None:
    sizes = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "num_key_value_heads": 2}
    multipliers = {"ssm_multipliers": [0.5, 0.25, 2.0, 3.0, 4.0]}
    config = resolve({"config": {"model_type": "falcon_h1", **SMALL_HEADS, **sizes, **multipliers}})
    model = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    materialize(model, InitByName(model, seed=0), device=torch.device("cpu"))
    found = model.model.layers[1].mamba.mup_vector.unique().tolist()
    assert sorted(found) == sorted(multipliers["ssm_multipliers"])


@pytest.mark.parametrize(("kind", "expected"), [("roberta", 0), ("bert", None), ("gemma", None)])
def test_end_of_text_is_padding_only_for_an_architecture_that_needs_one(kind: str, expected: int | None) -> None:
    fields = {"model_type": kind, **SMALL_HEADS, "max_position_embeddings": 64}
    more: dict[str, Any] = {"is_decoder": True} if kind != "gemma" else {"num_key_value_heads": 2, "head_dim": 8}
    assert resolve({"config": {**fields, **more}}).pad_token_id == expected
    assert resolve({"config": {**fields, **more, "pad_token_id": 7}}).pad_token_id == 7


def test_a_negative_padding_id_is_none_and_one_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    fields = {"model_type": "llama", **SMALL_HEADS, "vocab_size": 384}
    small_gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 384}
    assert resolve({"config": {**small_gpt2, "pad_token_id": 400}}).pad_token_id == 400  # its embedding asks for none
    for given, expected in ((-1, None), (383, 383)):
        (tmp_path / "config.json").write_text(json.dumps({**fields, "pad_token_id": given}))
        assert read_hf_config(tmp_path).pad_token_id == expected
        assert resolve({"config": {**fields, "pad_token_id": given}}).pad_token_id == expected
    (tmp_path / "config.json").write_text(json.dumps({**fields, "pad_token_id": 384}))
    with pytest.raises(ConfigError, match=r"pad_token_id of .*config.json = 384"):
        read_hf_config(tmp_path)
    with pytest.raises(ConfigError, match=r"model.config.pad_token_id = 384"):
        resolve({"config": {**fields, "pad_token_id": 384}})


def test_positions_that_begin_after_the_padding_id_must_be_enough_for_the_sequence() -> None:
    fields = {"model_type": "roberta", **SMALL_HEADS, "is_decoder": True, "pad_token_id": 7}
    config = resolve({"config": {**fields, "max_position_embeddings": 40}}, sequence_length=32)
    model = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    check_padded_positions(model, sequence_length=32)
    with pytest.raises(ConfigError, match=r"(?s)max_position_embeddings = 40.*use 41 or more"):
        check_padded_positions(model, sequence_length=33)


def test_sizes_that_differ_from_layer_to_layer_are_counted_layer_by_layer() -> None:
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "hidden_size_per_layer_input": 8, "sliding_window": 8}
    layers = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    fields = {"model_type": "gemma4_text", **SMALL_HEADS, **sizes, **layers, "vocab_size_per_layer_input": 320}
    config = resolve({"config": {**fields, "per_layer_config": {"2": {"head_dim": 16}}}})
    assert attention_widths(config) == [32, 32, 64]
    with pytest.raises(ConfigError, match="per_layer_config"):
        keep_layers(config, [0, 2])
    model = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    short, long = (measure(model, config, sequence_length=length).flops_per_token for length in (1, 2))
    assert long - short == 12 * (32 + 32 + 64)  # as `measure`: 12 h s for every layer


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_model_config_with_numbers_that_json_lacks_is_read_back_as_it_was(value: float) -> None:
    config = resolve({"config": {"model_type": "mamba2", "time_step_limit": [0.0, value], **_MAMBA2}})
    stored = json.loads(json.dumps(described(config), allow_nan=False))  # as a manifest: plain JSON
    manifest = Manifest("checkpoint", {}, {}, {"hf_config": stored}, {}, "", {})
    found = trained_config(manifest).time_step_limit
    assert list(found) == pytest.approx([0.0, value], nan_ok=True)


_MAMBA2 = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8}


def test_a_sequence_longer_than_a_loaded_models_positions_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings 2048"):
        resolve({"path": str(folder)}, sequence_length=4096)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        resolve({"path": str(tmp_path)})


def test_parameters_and_flops_per_token_of_llama_8b() -> None:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    model = build_meta(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    size = measure(model, config, sequence_length=8192)
    assert size.parameters == 8_030_261_248
    assert size.flops_per_token / 1e9 == pytest.approx(57.9, abs=0.05)


def test_the_flops_of_a_mixture_of_experts_count_the_experts_that_a_token_goes_to() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(**sizes, num_key_value_heads=4, vocab_size=256, num_local_experts=8, num_experts_per_tok=2)
    model = build_meta(config, dtype=torch.float32, attn_implementation="sdpa")
    size = measure(model, config, sequence_length=128)
    expert, attention, router = 3 * 64 * 96, 4 * 64 * 64, 8 * 64
    layer, norms = attention + router, 2 * 64
    assert size.parameters == 2 * 256 * 64 + 2 * (layer + norms + 8 * expert) + 64
    assert size.active == size.parameters - 2 * 6 * expert
    assert size.flops_per_token == 6 * (size.active - 256 * 64) + 12 * 2 * 64 * 128


def test_sizes_that_transformers_leaves_at_their_defaults_have_to_fit_too() -> None:
    with pytest.raises(ConfigError, match=r"model.config.num_experts_per_tok = 8\n"):
        resolve({"config": {"model_type": "deepseek_v3", "n_routed_experts": 4}})
    inside = {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 1}
    attention = {"kv_n_heads": 2, "rope_theta": 1e4}
    sizes: dict[str, Any] = {"model_type": "dbrx", "d_model": 32, "n_heads": 4, "n_layers": 2, "ffn_config": inside}
    with pytest.raises(ConfigError, match="use 2"):
        resolve({"config": {**sizes, "attn_config": {**attention, "kv_n_heads": 3}}})
    config = resolve({"config": {**sizes, "attn_config": attention}})
    size = measure(build_meta(config, dtype=torch.float32, attn_implementation="eager"), config, sequence_length=8)
    assert size.parameters - size.active == 3 * 2 * 3 * 32 * 32  # three of four experts, in two layers
    assert has_experts(config.to_dict())
