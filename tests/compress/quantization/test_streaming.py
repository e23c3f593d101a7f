"""Layer by layer: the tensors of the whole-model way, in a layer's memory, resumed; also from runs and checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foundation.directory import fresh_staging, read_manifest, sha256_of_file, verify
from foundation.errors import CheckpointError, ConfigError, DataError
from foundation.section import parse
from pipeline.compress.quantization import work
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.quantization.rules import QuantizationPlan, prepare, work_path
from pipeline.compress.quantization.streaming import stream, streamable
from pipeline.compress.quantization.trained import is_trained, model_folder
from pipeline.compress.quantization.weights import pack, save
from pipeline.compress.quantization.work import CalibrationWork
from pipeline.models.folder.loading import empty_model, load_model
from pipeline.models.folder.model_folder import ModelFolder
from tests import warm
from tests.compress.quantization.test_quantize import ENTRY, kill_once_written, packed_here, write_config
from tests.conftest import launch, tiny_config
from tests.conftest import write_config as write_run
from tests.evaluation.heldout.small import make_model
from tests.support import output_of

GPTQ: dict[str, Any] = {"scheme": "W4A16", "method": "gptq", "calibration": {"samples": 32}}


class KilledError(Exception):
    """The process ended here."""


def plan_of(folder: Path, model: Path, tokens: Path, **fields: Any) -> QuantizationPlan:
    folder.mkdir(exist_ok=True)
    return prepare(parse(QuantizeConfig, json.loads(write_config(folder, model, tokens, **fields).read_text())))


def streamed(plan: QuantizationPlan, **options: Any) -> Path:
    staging = fresh_staging(plan.output)
    stream(plan, staging, dtype=torch.float32, **options)
    return staging


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def hashes(folder: Path) -> dict[str, str]:
    return {file.name: sha256_of_file(file) for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def untied(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("untied") / "model", tokens, tied=False, steps=20)


@pytest.mark.parametrize(
    "fields",
    [
        GPTQ,
        {**GPTQ, "scheme": "W8A8", "smoothing": 0.5},
        {"scheme": "FP8", "smoothing": 0.5, "skip": []},
        {**GPTQ, "skip": ["lm_head", "re:.*down_proj"], "group_size": 16},
    ],
)
@pytest.mark.parametrize("source", ["model", "untied"])
def test_the_tensors_are_those_of_the_whole_model_way(
    fields: dict[str, Any], source: str, tokens: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(source)
    if source == "model" and not fields.get("skip", True):
        fields = {**fields, "skip": ["lm_head"]}  # tied
    plan = plan_of(tmp_path, folder, tokens, **fields)
    assert streamable(empty_model(folder), plan)
    staging = streamed(plan)
    packed_here(tmp_path, folder, tokens, **fields)
    found, expected = tensors_of(staging), tensors_of(tmp_path / "small")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name
    configs = [json.loads((each / "config.json").read_text()) for each in (staging, tmp_path / "small")]
    assert configs[0] == configs[1]
    load_model(staging)  # refuses missing and unexpected tensors
    assert len(list(staging.glob("model-*.safetensors"))) == 3  # two layers, and what is outside of them
    assert len(ModelFolder.open(staging).tensors) == len(found)  # by the index


def test_a_tensor_in_fp32_beside_weights_of_16_bits_stays_so(untied: Path, tokens: Path, tmp_path: Path) -> None:
    model = shutil.copytree(untied, tmp_path / "model")
    stored = {name: value.bfloat16() for name, value in tensors_of(model).items()}
    norms = {"model.norm.weight", "model.layers.1.input_layernorm.weight"}
    stored |= {name: torch.full_like(stored[name], 1.0001, dtype=torch.float32) for name in norms}
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    plan = plan_of(tmp_path, model, tokens, **GPTQ)
    staging = fresh_staging(plan.output)
    stream(plan, staging, dtype=torch.bfloat16)
    loaded = load_model(model, dtype=torch.float32)
    save(loaded, pack(loaded, plan, dtype=torch.bfloat16), tmp_path / "small")
    for folder in (staging, tmp_path / "small"):
        found = tensors_of(folder)
        assert {name for name, value in found.items() if value.dtype == torch.float32} == norms
        assert all(torch.equal(found[name], stored[name]) for name in norms)


@pytest.mark.parametrize("done", [1, 2])
def test_a_killed_calibration_goes_on_to_the_same_bytes(done: int, model: Path, tokens: Path, tmp_path: Path) -> None:
    expected = hashes(streamed(plan_of(tmp_path / "whole", model, tokens, **GPTQ)))
    plan = plan_of(tmp_path / "killed", model, tokens, **GPTQ)

    def until(left: range, _every: int) -> Iterator[int]:
        for number in left:
            yield number
            if number + 1 == done:
                raise KilledError

    with pytest.raises(KilledError):
        streamed(plan, progress=until)
    assert CalibrationWork.open(plan).done == done
    said: list[str] = []
    ran: list[int] = []

    def note(left: range, _every: int) -> Iterable[int]:
        ran.extend(left)
        return left

    assert hashes(streamed(plan, say=said.append, progress=note)) == expected
    assert ran == list(range(done, 2))
    assert said == ["resuming at layer 2 of 2" if done == 1 else "all 2 layers are there"]


def test_edited_layers_are_not_used(model: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(tmp_path, model, tokens, **GPTQ)
    CalibrationWork.open(plan).finish(0, {"weight": torch.ones(1)}, [])
    assert CalibrationWork.open(plan).done == 1
    gptq, *others = sorted(work.sources(), key=lambda file: file.name != "gptq.py")
    edited = tmp_path / gptq.name
    edited.write_text(gptq.read_text().replace("_LEAF = 8", "_LEAF = 4"))
    monkeypatch.setattr(work, "sources", lambda: [edited, *others])
    assert CalibrationWork.open(plan).done == 0


@pytest.mark.parametrize("other", [{"calibration": {"samples": 16}}, {"scheme": "W8A8"}, {"smoothing": 0.5}])
def test_layers_of_other_configs_are_not_used(other: dict[str, Any], model: Path, tokens: Path, tmp_path: Path) -> None:
    streamed(plan_of(tmp_path, model, tokens, **GPTQ))
    assert CalibrationWork.open(plan_of(tmp_path, model, tokens, **GPTQ)).done == 2
    assert CalibrationWork.open(plan_of(tmp_path, model, tokens, **{**GPTQ, **other})).done == 0


def test_layers_of_another_model_are_not_used(model: Path, untied: Path, tokens: Path, tmp_path: Path) -> None:
    streamed(plan_of(tmp_path, model, tokens, **GPTQ))
    assert CalibrationWork.open(plan_of(tmp_path, untied, tokens, **GPTQ)).done == 0


def test_one_layer_is_in_memory_at_a_time(model: Path, tokens: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """While a layer is calibrated, all other parameters are on the meta device."""
    from pipeline.compress.quantization import streaming  # noqa: PLC0415

    seen = []
    original = streaming._PartwiseModel.packed

    def packed(parts: Any, layer: Any, scales: Any) -> Any:
        real = {name for name, p in parts.model.named_parameters() if not p.is_meta}
        within = {name for name, p in parts.model.named_parameters() if any(p is q for q in layer.parameters())}
        seen.append((real == within, len(real)))
        return original(parts, layer, scales)

    monkeypatch.setattr(streaming._PartwiseModel, "packed", packed)
    streamed(plan_of(tmp_path, model, tokens, **GPTQ))
    assert seen == [(True, 9), (True, 9)]  # 7 matrices and 2 norms


@pytest.mark.integration
def test_a_process_killed_after_its_first_layer_is_resumed(model: Path, tokens: Path, tmp_path: Path) -> None:
    expected = hashes(streamed(plan_of(tmp_path / "whole", model, tokens, **GPTQ)))
    folder = tmp_path / "killed"
    folder.mkdir()
    config = write_config(folder, model, tokens, **GPTQ, consumers=["transformers"])
    kill_once_written(config, work_path(folder / "small") / "layers" / "layer-00000.safetensors")
    assert not (folder / "small").exists()
    done = warm.run(ENTRY, "--config", config)
    assert done.returncode == 0, done.stderr
    assert "resuming at layer 2 of 2" in done.stderr or "all 2 layers are there" in done.stderr
    manifest = read_manifest(folder / "small", kind="model")
    assert all(good for _, good in verify(folder / "small", manifest))
    written_now = hashes(folder / "small")
    assert {name: written_now[name] for name in expected if name.endswith(".safetensors")} == {
        name: value for name, value in expected.items() if name.endswith(".safetensors")
    }
    assert not work_path(folder / "small").exists()


@pytest.mark.integration
def test_after_a_refusal_another_bound_needs_no_calibration(model: Path, tokens: Path, tmp_path: Path) -> None:
    fields = {**GPTQ, "consumers": ["transformers"]}
    refused = warm.run(ENTRY, "--config", write_config(tmp_path, model, tokens, **fields, max_mean_kl=1e-9))
    assert refused.returncode != 0
    assert "the calibrated layers are kept" in refused.stderr
    assert not (tmp_path / "small").exists()
    done = warm.run(ENTRY, "--config", write_config(tmp_path, model, tokens, **fields))
    assert done.returncode == 0, done.stderr
    assert "all 2 layers are there" in done.stderr
    assert not work_path(tmp_path / "small").exists()


GPTQ_OF_16: dict[str, Any] = {"scheme": "W4A16", "method": "gptq", "group_size": 16, "calibration": {"samples": 16}}


def config_of(folder: Path, model: Path, tokens: Path, **fields: Any) -> QuantizeConfig:
    return parse(QuantizeConfig, json.loads(write_config(folder, model, tokens, **fields).read_text()))


@pytest.fixture(scope="module")
def run_dir(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two tensor-parallel ranks, with two checkpoints."""
    work = tmp_path_factory.mktemp("run")
    config = tiny_config(tokens, work / "run") | {"engine": "torch", "parallel": {"tp": 2}}
    config["zero_optimization"] = {"stage": 0}
    config["run"] |= {"steps": 10, "checkpoint_every": 5}
    launch("train.py", write_run(work / "c.json", config), processes=2)
    return work / "run"


@pytest.mark.integration
def test_a_sharded_run_is_exported_once_to_the_same_bytes(run_dir: Path, tokens: Path, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    warm.run("-m", "pipeline", "export", run_dir, exported).check_returncode()
    found = []
    for name, source in (("run", run_dir), ("folder", exported)):
        (tmp_path / name).mkdir()
        config = config_of(tmp_path / name, source, tokens, **GPTQ_OF_16)
        with model_folder(config) as folder:
            plan = prepare(config, folder=folder)
            staging = fresh_staging(plan.output)
            stream(plan, staging, dtype=torch.float32)
        found.append({file.name: sha256_of_file(file) for file in staging.glob("*.safetensors")})
    assert found[0] == found[1]
    config = config_of(tmp_path / "run", run_dir, tokens, **GPTQ_OF_16)
    marker = work_path(tmp_path / "run/small") / "model/marker"
    marker.touch()
    with model_folder(config) as folder:
        assert folder == marker.parent
        assert marker.exists()  # as a killed run left it
    older = run_dir / "checkpoints/step-00000005"
    with model_folder(config_of(tmp_path / "run", older, tokens, **GPTQ_OF_16)) as folder:
        assert not marker.exists()  # another checkpoint
        parent = read_manifest(folder, kind="model").parents["checkpoint"]
    assert parent["fingerprint"] == read_manifest(older, kind="checkpoint").fingerprint


@pytest.mark.integration
def test_the_result_of_a_run_names_the_checkpoint_as_its_parent(run_dir: Path, tokens: Path, tmp_path: Path) -> None:
    fields = {**GPTQ_OF_16, "consumers": ["transformers"], "max_mean_kl": 1.0}
    output_of(warm.run(ENTRY, "--config", write_config(tmp_path, run_dir, tokens, **fields)))
    manifest = read_manifest(tmp_path / "small", kind="model")
    newest = read_manifest(run_dir / "checkpoints/step-00000010", kind="checkpoint")
    assert manifest.parents["checkpoint"]["fingerprint"] == newest.fingerprint
    assert manifest.config["model"] == str(run_dir)
    assert not work_path(tmp_path / "small").exists()


def test_what_cannot_work_is_refused_before_the_export(model: Path, tokens: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    assert is_trained(run)
    assert not is_trained(model)

    def enter(**fields: Any) -> None:
        with model_folder(config_of(tmp_path, run, tokens, **{**GPTQ_OF_16, **fields})):
            raise AssertionError("it was exported")

    with pytest.raises(CheckpointError, match="no finished checkpoint"):
        enter()
    assert not work_path(tmp_path / "small").exists()
    with pytest.raises(DataError, match="no such directory"):
        enter(data={"path": str(tmp_path / "nothing"), "sequence_length": 32})
    (tmp_path / "small").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        enter()
