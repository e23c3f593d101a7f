"""Refusals of quantize: before torch is imported, with nothing written, and with a remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from foundation.errors import ConfigError, DataError, HeadraceError
from foundation.section import parse
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.quantization.rules import prepare
from pipeline.evaluation.heldout.measure import measure
from tests import warm
from tests.compress.quantization.test_quantize import ENTRY, write_config
from tests.evaluation.heldout.small import SEQUENCE, TEXTS, VOCAB, make_tokens, run_python
from tests.support import refusal_of


def refusal(folder: Path, model: Path, tokens: Path, **fields: Any) -> str:
    raw = json.loads(write_config(folder, model, tokens, **fields).read_text())
    with pytest.raises(HeadraceError) as caught:
        prepare(parse(QuantizeConfig, raw))
    return str(caught.value)


def test_a_refusal_imports_no_torch_and_writes_nothing(model: Path, tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model, tokens, scheme="W4A16", group_size=64)
    *imports, field, why, remedy = refusal_of(run_python("-X", "importtime", ENTRY, "--config", config)).splitlines()
    assert field == "error: group_size = 64"
    assert "96 inputs, which 64 does not divide" in why
    assert "32, which divides" in remedy
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in imports if line.startswith("import time")}
    assert "pydantic" in imported  # the list is what we think it is
    assert not imported & {"torch", "transformers", "compressed_tensors"}
    assert [p.name for p in tmp_path.iterdir()] == ["quantize.json"]


def test_a_dtype_is_left_out_for_gguf_as_the_refusal_says(model: Path, tokens: Path, tmp_path: Path) -> None:
    assert "try: leave it out (--set dtype=null)" in refusal(tmp_path, model, tokens, scheme="Q8_0", dtype="bfloat16")
    raw = json.loads(write_config(tmp_path, model, tokens, scheme="Q8_0", dtype="bfloat16").read_text())
    prepare(parse(QuantizeConfig, {**raw, "dtype": None}))


def test_a_misspelled_key_is_refused_with_the_right_one(model: Path, tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model, tokens)
    said = refusal_of(warm.run(ENTRY, "--config", config, "--set", "group_sise=32"))
    assert "did you mean 'group_size'?" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"scheme": "int3"}, "scheme = 'int3'"),
        ({"scheme": "W4A16", "group_size": 0}, "group_size = 0"),
        ({"scheme": "W4A16", "group_size": 48}, "try: use 32, which divides"),
        ({"scheme": "W4A16", "group_size": 20}, "try: use 16 or 32"),
        ({"scheme": "W8A16", "group_size": 1000}, "try: use 32"),
        ({"skip": []}, "the head of"),
        ({"skip": ["lm_head", "model.layers.0.mlp.up_prj"]}, "did you mean 'model.layers.0.mlp.up_proj'?"),
        ({"skip": ["re:("]}, "not a regular expression"),
        ({"skip": ["re:.*"]}, "no linear layer"),
        (
            {"skip": ["lm_head", "model.layers.1.self_attn.q_proj"]},
            "vLLM runs k_proj, q_proj, v_proj of a layer as one",
        ),
        ({"skip": ["lm_head", "re:.*up_proj$"]}, "vLLM runs gate_proj, up_proj of a layer as one"),
    ],
)
def test_an_invalid_config_is_refused(
    model: Path, tokens: Path, tmp_path: Path, fields: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(tmp_path, model, tokens, **fields)


@pytest.mark.parametrize(("skip", "left"), [("re:.*k_proj$", 8), ("model.layers.1.self_attn.k_proj", 11)])
def test_the_remedy_for_a_part_of_a_fused_product_works(
    skip: str, left: int, model: Path, tokens: Path, tmp_path: Path
) -> None:
    said = refusal(tmp_path, model, tokens, skip=["lm_head", skip])
    entry = json.loads(said.rpartition("skip all of them: ")[2])
    raw = json.loads(write_config(tmp_path, model, tokens, skip=["lm_head", skip, entry]).read_text())
    assert len(prepare(parse(QuantizeConfig, raw)).layers) == left  # of 7 in each of 2 layers
    own = json.loads(write_config(tmp_path, model, tokens, skip=["lm_head", skip]).read_text())
    assert len(prepare(parse(QuantizeConfig, own | {"consumers": ["transformers"]})).layers) > left


def test_an_existing_output_is_not_changed(model: Path, tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    assert "it already exists" in refusal(tmp_path, model, tokens)


def test_a_missing_path_is_refused(model: Path, tokens: Path, tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path, tmp_path / "none", tokens)
    assert "no such directory" in refusal(tmp_path, model, tmp_path / "none")


def test_truncated_weights_are_refused(model: Path, tokens: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(model, tmp_path / "copied"))
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "truncated or overwritten" in refusal_of(warm.run(ENTRY, "--config", write_config(tmp_path, copied, tokens)))
    assert not (tmp_path / "small").exists()


def test_a_dataset_of_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    other = make_tokens(tmp_path / "other", [text.upper() for text in TEXTS])
    assert "data.path" in refusal(tmp_path, model, other)


def test_a_quantized_model_is_not_quantized_again(model: Path, tokens: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(model, tmp_path / "copied"))
    config = json.loads((copied / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (copied / "config.json").write_text(json.dumps(config))
    assert "already quantized, by gptq" in refusal(tmp_path, copied, tokens)


def test_layers_that_are_not_linear_modules_are_refused_with_nothing_left(tokens: Path, tmp_path: Path) -> None:
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": SEQUENCE, "vocab_size": VOCAB}
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(tmp_path / "gpt2")
    said = refusal_of(warm.run(ENTRY, "--config", write_config(tmp_path, tmp_path / "gpt2", tokens, scheme="W4A16")))
    assert "is Conv1D, and only torch.nn.Linear can be quantized" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpt2", "quantize.json"]


@pytest.mark.integration
def test_a_result_without_a_finite_perplexity_is_not_accepted(model: Path, tokens: Path, tmp_path: Path) -> None:
    broken = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    broken.save_pretrained(tmp_path / "broken")
    data = parse(QuantizeConfig, json.loads(write_config(tmp_path, model, tokens).read_text())).data
    with pytest.raises(DataError, match="perplexity is nan"):
        measure(tmp_path / "broken", data)


def test_a_null_group_is_a_row_for_int8_and_32_for_int4() -> None:
    fields: dict[str, Any] = {"model": "m", "output": "o", "data": {"path": "d"}}
    assert parse(QuantizeConfig, {**fields, "scheme": "W8A16"}).group is None
    assert parse(QuantizeConfig, {**fields, "scheme": "W4A16"}).group == 32
    assert parse(QuantizeConfig, {**fields, "scheme": "W8A16", "group_size": 16}).group == 16


def test_a_string_is_not_a_number() -> None:
    with pytest.raises(ConfigError, match="group_size"):
        parse(
            QuantizeConfig, {"model": "m", "output": "o", "data": {"path": "d"}, "scheme": "W4A16", "group_size": "32"}
        )
