"""Quantized folders are what they say: packed, loadable by anyone, measured in a fresh process, whole or absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from foundation.directory import Manifest, read_manifest, sha256_of_file, staging_path, verify
from foundation.remote_directory import CACHE, fetch
from foundation.remote_publish import publish
from foundation.section import parse
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.quantization.rules import QuantizationPlan, prepare
from pipeline.compress.quantization.weights import pack, save
from pipeline.data.dataset import TokenDataset
from pipeline.models.folder.loading import load_model
from pipeline.models.folder.model_folder import ModelFolder
from tests import warm
from tests.evaluation.heldout.small import SEQUENCE, make_model, run_python
from tests.object_store import s3_server
from tests.support import kill_group, output_of, wait_until

ENTRY = Path(__file__).resolve().parents[3] / "pipeline" / "quantize.py"

# what a user of transformers would write, with nothing of this project in it
PLAIN = """
import json, sys, torch
from transformers import AutoModelForCausalLM
rows = torch.tensor(json.load(open(sys.argv[1])))
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(input_ids=rows[:, :-1]).logits.float()
    print(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item())
"""


def kill_once_written(config: Path, written: Path) -> None:
    command = [sys.executable, str(ENTRY), "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_until(written.exists, process=process, poll_s=0.002)
    kill_group(process)


@dataclass(frozen=True)
class Made:
    path: Path
    manifest: Manifest
    stdout: str


def write_config(folder: Path, model: Path, tokens: Path, **fields: Any) -> Path:
    config = {"model": str(model), "output": str(folder / "small"), "scheme": "W8A16", **fields}
    config.setdefault("data", {"path": str(tokens), "sequence_length": SEQUENCE, "batch_size": 8})
    path = folder / "quantize.json"
    path.write_text(json.dumps(config))
    return path


def quantize(folder: Path, model: Path, tokens: Path, **fields: Any) -> Made:
    said = output_of(warm.run(ENTRY, "--config", write_config(folder, model, tokens, **fields)))
    return Made(folder / "small", read_manifest(folder / "small", kind="model"), said)


@pytest.fixture(scope="module")
def int8(model: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("int8")
    leftover = staging_path(folder / "small") / "tokenizer.leftover"  # as a run leaves it that was killed here
    leftover.parent.mkdir()
    leftover.touch()
    return quantize(folder, model, tokens, scheme="W8A16")


@pytest.fixture(scope="module")
def int4(model: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return quantize(tmp_path_factory.mktemp("int4"), model, tokens, scheme="W4A16", dtype="bfloat16")


@pytest.fixture(params=["int8", "int4"])
def made(request: pytest.FixtureRequest) -> Made:
    result: Made = request.getfixturevalue(request.param)
    return result


@pytest.mark.integration
def test_plain_transformers_gives_the_manifests_numbers(int8: Made, int4: Made, tokens: Path, tmp_path: Path) -> None:
    dataset = TokenDataset.open(tokens, split="heldout", sequence_length=SEQUENCE)
    (tmp_path / "rows.json").write_text(json.dumps(dataset.read(range(dataset.windows)).tolist()))
    said = output_of(run_python("-c", PLAIN, tmp_path / "rows.json", int8.path, int4.path, cwd=tmp_path))
    # int8 runs in float32; int4 in bfloat16, where matmuls round differently for another batch shape
    for made, tolerance, line in zip((int8, int4), (1e-5, 2e-3), said.split(), strict=True):
        assert float(line) == pytest.approx(made.manifest.details["after"]["loss_nats"], rel=tolerance)


def test_the_quantized_model_is_close_to_the_original(made: Made) -> None:
    before, after = made.manifest.details["before"], made.manifest.details["after"]
    assert before["loss_nats"] < 5.0  # ln 384 = 5.95 would be an untrained model, for which rounding changes nothing
    assert after["loss_nats"] == pytest.approx(before["loss_nats"], rel=0.03)
    assert after["loss_nats"] != before["loss_nats"]


def test_packed_weights_have_the_reported_bits(int8: Made, int4: Made) -> None:
    for result, bits, scale_bits in ((int8, 8, 32), (int4, 4, 16)):
        folder = ModelFolder.open(result.path)
        packed = {name: t for name, t in folder.tensors.items() if name.endswith("weight_packed")}
        count = result.manifest.details["quantization"]["parameters"]
        assert sum(t.bytes for t in packed.values()) * 8 == bits * count
        scales = sum(prod(t.shape) for n, t in folder.tensors.items() if n.endswith("weight_scale"))
        expected = bits + (scales * scale_bits + len(packed) * 2 * 64) / count  # and each shape: two int64
        assert result.manifest.details["quantization"]["bits_per_quantized_weight"] == pytest.approx(expected)
        assert result.manifest.details["after"]["weight_bytes"] == (result.path / "model.safetensors").stat().st_size


def test_the_ends_of_generation_are_kept_and_no_code_is_named_that_is_not_there(made: Made, model: Path) -> None:
    name = "generation_config.json"
    assert (made.path / name).read_bytes() == (model / name).read_bytes()
    assert "auto_map" not in json.loads((made.path / "config.json").read_text())


def test_embeddings_and_norms_are_not_quantized(made: Made) -> None:
    tensors = ModelFolder.open(made.path).tensors
    word = {"float32": "F32", "bfloat16": "BF16"}[made.manifest.details["after"]["dtype"]]
    assert tensors["model.embed_tokens.weight"].dtype == word
    assert tensors["model.norm.weight"].dtype == word
    assert "lm_head.weight" not in tensors  # tied


def test_the_directory_is_a_model_with_its_parents_and_tokenizer(made: Made, model: Path, tokens: Path) -> None:
    assert all(good for _, good in verify(made.path, made.manifest))
    assert made.manifest.parents["data"]["fingerprint"] == read_manifest(tokens, kind="tokens").fingerprint
    assert made.manifest.parents["model"] == {"path": str(model), "fingerprint": ModelFolder.open(model).fingerprint()}
    text = "The mill at race 7"
    same = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(made.path)(text)["input_ids"] == same
    assert not staging_path(made.path).exists()
    assert (made.path / "model.safetensors").stat().st_mode & 0o044 == 0o044 & ~umask()


def umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_the_table_shows_before_and_after(made: Made) -> None:
    for row in ("parameters", "weights on disk", "bits per weight", "perplexity", "bits per byte", "tokens/s"):
        assert row in made.stdout
    assert f"{made.manifest.details['after']['perplexity']:.3f}" in made.stdout


def packed_here(folder: Path, model: Path, tokens: Path, **fields: Any) -> QuantizationPlan:
    """The part of `quantize` that writes weights, in this process: folder/small, and the plan it came from."""
    plan = prepare(parse(QuantizeConfig, json.loads(write_config(folder, model, tokens, **fields).read_text())))
    loaded = load_model(model, dtype=torch.float32)
    save(loaded, pack(loaded, plan, dtype=torch.float32), folder / "small")
    return plan


def test_the_same_input_gives_the_same_bytes(int8: Made, model: Path, tokens: Path, tmp_path: Path) -> None:
    packed_here(tmp_path, model, tokens)
    assert sha256_of_file(tmp_path / "small/model.safetensors") == int8.manifest.files["model.safetensors"]["sha256"]


def test_an_untied_head_can_be_quantized_too(tokens: Path, tmp_path: Path) -> None:
    source = make_model(tmp_path / "untied", tokens, tied=False, steps=1)
    plan = packed_here(tmp_path, source, tokens, skip=[])
    assert "lm_head.weight_packed" in ModelFolder.open(tmp_path / "small").tensors
    assert len(plan.layers) == 15  # 7 in each of 2 blocks, and the head
    load_model(tmp_path / "small")  # refuses missing and unexpected tensors


def test_leftovers_of_a_killed_run_are_not_used_by_the_next(int8: Made) -> None:
    assert "tokenizer.leftover" not in int8.manifest.files
    assert not staging_path(int8.path).exists()


@pytest.mark.integration
def test_a_killed_run_leaves_nothing_under_the_final_name(model: Path, tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model, tokens)
    output = tmp_path / "small"
    kill_once_written(config, staging_path(output) / "model.safetensors")
    assert not output.exists()


@pytest.mark.integration
def test_model_data_and_output_in_a_store_give_the_bytes_of_paths(
    int8: Made, model: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    store = "s3://quantized"
    with s3_server("quantized") as files:
        publish(tokens, f"{store}/tokens")
        files.put(str(model), f"{store}/model", recursive=True)
        data = {"path": f"{store}/tokens", "sequence_length": SEQUENCE, "batch_size": 8}
        config = write_config(tmp_path, model, tokens, output=f"{store}/small", data=data)
        config.write_text(json.dumps({**json.loads(config.read_text()), "model": f"{store}/model"}))
        output_of(warm.run(ENTRY, "--config", config))
        fetch(f"{store}/small", tmp_path / "back")
        assert "exists already" in warm.run(ENTRY, "--config", config).stderr
    for name in int8.manifest.files:
        assert (tmp_path / "back" / name).read_bytes() == (int8.path / name).read_bytes(), name
    parents = read_manifest(tmp_path / "back", kind="model").parents
    assert parents["data"]["path"] == f"{store}/tokens"
    assert parents["model"]["path"] == f"{store}/model"
    assert not [path for path in (tmp_path / "cache/outputs").rglob("*") if not path.name.endswith(".lock")]
