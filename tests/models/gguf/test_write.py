"""GGUF files of every architecture give llama.cpp transformers' predictions; each type rounds as much as is said."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from foundation.errors import ConfigError, DataError
from pipeline.evaluation.consumers.compare import kl_divergence
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.gguf import architectures
from pipeline.models.gguf.plan import GgufPlan, plan_file
from pipeline.models.gguf.types import BY_GGUF, FILE_TYPES, FLOATING_POINT, ROUNDING, fitting, more_bits, type_of
from pipeline.models.gguf.write import FILE, check, encoded, write
from tests.evaluation.heldout.small import VOCAB, make_tokenizer
from tests.models.architectures import config_of, scale_up

T = 24
NAMES = ("llama", "llama_tied", "llama_one_kv_head", "qwen3", "mistral", "gemma", "gpt2", "mixtral", "qwen3_moe")
FIELDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": True},
    "gpt2": {"bos_token_id": 0, "eos_token_id": 0},
}
SCALED = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}
SCALED |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}

SCORE = """
import sys
from pathlib import Path
import numpy as np
from pipeline.models.gguf.libllama import Model
ids = np.load(sys.argv[1])
for file in sys.argv[2:]:
    np.save(file + ".npy", Model(Path(file)).logits(ids.tolist()))
"""


def make_folder(folder: Path, name: str, **fields: Any) -> ModelFolder:
    """A model of three layers with random weights, far from uniform, and a tokenizer."""
    torch.manual_seed(0)
    positions = {} if name == "gpt2" else {"max_position_embeddings": 128}
    given = {"vocab_size": VOCAB, **positions, **FIELDS.get(name, {}), **fields}
    model = AutoModelForCausalLM.from_config(config_of(name, **given)).eval()
    scale_up(model, spread=6.0)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return ModelFolder.open(folder)


def written(source: ModelFolder, kind: str, folder: Path) -> GgufPlan:
    folder.mkdir(parents=True)
    plan = plan_file(source, kind)
    write(plan, folder)
    check(plan, folder)
    return plan


def divergences(source: ModelFolder, files: list[Path], work: Path) -> list[float]:
    """Mean KL divergence of each file's predictions, by llama.cpp, from transformers' of the folder."""
    ids = np.random.default_rng(1).integers(0, VOCAB, T)
    np.save(work / "ids.npy", ids)
    subprocess.run([sys.executable, "-c", SCORE, work / "ids.npy", *files], check=True)
    model = AutoModelForCausalLM.from_pretrained(source.path).eval()
    with torch.inference_mode():
        expected = model(input_ids=torch.from_numpy(ids)[None]).logits[0].double().log_softmax(-1).numpy()
    logits = [torch.from_numpy(np.load(f"{file}.npy")) for file in files]
    return [float(kl_divergence(expected, each.double().log_softmax(-1).numpy()).mean()) for each in logits]


@pytest.mark.integration
@pytest.mark.usefixtures("llama_cpp")
@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_predicts_what_transformers_does(name: str, tmp_path: Path) -> None:
    source = make_folder(tmp_path / "model", name)
    for kind in ("F32", "Q8_0", "Q4_K_M"):
        written(source, kind, tmp_path / kind)
    exact, eight, four = divergences(source, [tmp_path / kind / FILE for kind in ("F32", "Q8_0", "Q4_K_M")], tmp_path)
    assert exact < 1e-6  # llama.cpp keeps keys and values in fp16; a wrong permutation gives 1e-2 and more
    assert exact < eight < 2e-3
    assert eight < four < 0.1


@pytest.mark.usefixtures("llama_cpp")
def test_scaled_rotary_positions_and_a_wrong_permutation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3's scaling is exact; a file with queries and keys in the wrong order is far off, so the test can tell."""
    source = make_folder(tmp_path / "model", "llama", rope_parameters=SCALED)
    written(source, "F32", tmp_path / "right")
    wrong = replace(architectures.ARCHITECTURES["llama"], permuted=False)
    monkeypatch.setitem(architectures.ARCHITECTURES, "llama", wrong)
    written(source, "F32", tmp_path / "wrong")
    right, broken = divergences(source, [tmp_path / "right" / FILE, tmp_path / "wrong" / FILE], tmp_path)
    assert right < 1e-6
    assert broken > 1e-2


def test_a_file_without_llama_cpp(tmp_path: Path) -> None:
    """Q8_0 is written and read back by the package gguf alone, every tensor of it compared."""
    source = make_folder(tmp_path / "model", "llama_tied")
    plan = written(source, "Q8_0", tmp_path / "out")
    quantized = {tensor.name for tensor in plan.quantized}
    assert "token_embd.weight" in quantized
    assert "output_norm.weight" not in quantized
    size = (tmp_path / "out" / FILE).stat().st_size
    assert sum(tensor.stored_bytes for tensor in plan.tensors) < size < 2 * source.parameters


def test_a_damaged_file_is_found_when_it_is_read_back(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "model", "llama")
    plan = written(source, "Q8_0", tmp_path / "out")
    file = tmp_path / "out" / FILE
    raw = bytearray(file.read_bytes())
    raw[-2000:-1000] = bytes(1000)  # tensors are at the end
    file.write_bytes(raw)
    with pytest.raises(DataError, match="differs from the original"):
        check(plan, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("phi", {}, "GGUF files of this architecture are not written"),
        ("llama_biases", {}, "biases were not tried"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "some of its layers have no experts"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "scaled by yarn"),
    ],
)
def test_what_llama_cpp_cannot_compute_is_refused(name: str, fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    source = make_folder(tmp_path / "model", name, **fields)
    with pytest.raises(ConfigError, match=why):
        plan_file(source, "Q8_0")


GEMMA2 = {"model_type": "gemma2", "hidden_size": 32, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 3}
GEMMA2 |= {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA2 |= {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


@pytest.mark.parametrize(
    ("config", "key", "value", "taken"),
    [
        *(
            ({"model_type": kind}, "hidden_act", "gelu", '"silu"')
            for kind in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
        ),
        ({"model_type": "qwen3"}, "attention_bias", True, "false"),
        ({"model_type": "gemma"}, "hidden_act", "relu", '"gelu_pytorch_tanh"'),
        ({"model_type": "gemma"}, "tie_word_embeddings", False, "true"),
        ({"model_type": "gemma"}, "use_bidirectional_attention", True, "false"),
        ({"model_type": "gpt2"}, "activation_function", "gelu", '"gelu_pytorch_tanh"'),
        ({"model_type": "gpt2"}, "scale_attn_weights", False, "true"),
        ({"model_type": "gpt2"}, "scale_attn_by_inverse_layer_idx", True, "false"),
        (GEMMA2, "hidden_activation", "relu", '"gelu_pytorch_tanh"'),
        (GEMMA2, "query_pre_attn_scalar", 144, "16"),
        ({**GEMMA2, "num_hidden_layers": 46, "layer_types": None}, "query_pre_attn_scalar", 16, "8"),
        (GEMMA2, "layer_types", ["full_attention"] * 3, '"sliding_attention", "full_attention"'),
        (GEMMA2, "attn_logit_softcapping", None, "a number"),
    ],
)
def test_a_value_that_llama_cpp_fixes_is_refused_by_its_key(
    config: dict[str, Any], key: str, value: object, taken: str
) -> None:
    plain = {"norm_topk_prob": True, **config}
    with pytest.raises(ConfigError, match=f"model \\({key} of config.json\\)") as caught:
        architectures.architecture_of({**plain, key: value})
    assert taken in str(caught.value)


def test_two_tensors_of_the_folder_for_one_of_the_file_are_refused(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "model", "llama")
    tensors = load_file(source.path / "model.safetensors")
    tensors["layers.0.attention.wq.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"] + 1
    save_file(tensors, source.path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers.0.attention.wq.weight.*are one tensor of llama.cpp"):
        plan_file(ModelFolder.open(source.path), "Q8_0")


def test_windows_longer_than_a_sliding_window_that_llama_cpp_ignores_are_refused(tmp_path: Path) -> None:
    plan = plan_file(make_folder(tmp_path / "model", "mistral", sliding_window=7), "Q8_0")
    plan.check_context(7)
    plan_file(make_folder(tmp_path / "gpt2", "gpt2"), "Q8_0").check_context(64)
    with pytest.raises(ConfigError, match="for 7 tokens at most"):
        plan.check_context(8)


def test_a_head_that_is_not_the_embedding_is_refused_and_the_remedy_writes_it(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "model", "llama")  # untied
    config = json.loads((source.path / "config.json").read_text())
    (source.path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(
        DataError, match=r'lm_head.weight and model.embed_tokens.weight.*\n.*"tie_word_embeddings": false'
    ):
        ModelFolder.open(source.path)
    (source.path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    plan = written(ModelFolder.open(source.path), "Q8_0", tmp_path / "out")
    assert "output.weight" in {tensor.name for tensor in plan.tensors}


def test_a_mix_gives_the_head_and_some_projections_more_bits() -> None:
    mix = FILE_TYPES["Q4_K_M"]

    def of(name: str, *, tied: bool = False, shape: tuple[int, ...] = (512, 512)) -> Q:
        return type_of(name, shape, mix, layers=16, tied=tied)

    assert of("output.weight") is Q.Q6_K
    assert of("token_embd.weight") is Q.Q4_K
    assert of("token_embd.weight", tied=True) is Q.Q6_K
    assert of("blk.0.attn_v.weight") is Q.Q6_K
    assert of("blk.0.attn_q.weight") is Q.Q4_K
    assert of("blk.2.ffn_down.weight") is Q.Q4_K
    assert of("blk.4.ffn_down.weight") is Q.Q6_K
    assert of("blk.3.attn_norm.weight", shape=(512,)) is Q.F32
    assert of("blk.3.ffn_gate_inp.weight") is Q.F32


def test_the_first_and_last_eighth_and_every_third_layer_between_get_more_bits() -> None:
    assert [layer for layer in range(16) if more_bits(layer, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]


@pytest.mark.parametrize(
    ("wanted", "width", "given"),
    [
        (Q.Q4_K, 512, Q.Q4_K),
        (Q.Q4_K, 96, Q.Q5_0),  # no multiple of 256
        (Q.Q6_K, 96, Q.Q8_0),
        (Q.Q6_K, 100, Q.F16),  # no multiple of 32
        (Q.Q8_0, 100, Q.F16),
    ],
)
def test_rows_that_blocks_do_not_divide_fall_back(wanted: Q, width: int, given: Q) -> None:
    assert fitting(wanted, width) is given


@pytest.mark.parametrize("kind", sorted(set(ROUNDING) - {Q.F32}, key=int))
def test_a_type_rounds_normal_weights_by_a_third_of_its_bound_or_so(kind: Q, request: pytest.FixtureRequest) -> None:
    if kind not in BY_GGUF:
        request.getfixturevalue("llama_cpp")
    values = np.random.default_rng(0).standard_normal((16, 1024)).astype(np.float32)
    back = dequantize(encoded(values, kind), kind).reshape(values.shape)
    error = float(np.sqrt(np.mean(np.square(back - values))))
    assert 0.15 * ROUNDING[kind] < error < 0.5 * ROUNDING[kind]


def test_every_type_has_a_bound() -> None:
    used = {each for file in FILE_TYPES.values() for each in (file.base, file.more, file.head)}
    assert used <= set(ROUNDING)
    assert set(ROUNDING) >= FLOATING_POINT
