"""A run or a checkpoint of any layout can be quantized as an exported folder can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.directory import fresh_staging, read_manifest, sha256_of_file
from foundation.errors import CheckpointError, ConfigError, DataError
from foundation.section import parse
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.quantization.rules import prepare, work_path
from pipeline.compress.quantization.streaming import stream
from pipeline.compress.quantization.trained import is_trained, model_folder
from tests import warm
from tests.compress.quantization.test_quantize import ENTRY, write_config
from tests.conftest import launch, tiny_config
from tests.conftest import write_config as write_run
from tests.support import output_of

GPTQ: dict[str, Any] = {"scheme": "W4A16", "method": "gptq", "group_size": 16, "calibration": {"samples": 16}}


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
        config = config_of(tmp_path / name, source, tokens, **GPTQ)
        with model_folder(config) as folder:
            plan = prepare(config, folder=folder)
            staging = fresh_staging(plan.output)
            stream(plan, staging, dtype=torch.float32)
        found.append({file.name: sha256_of_file(file) for file in staging.glob("*.safetensors")})
    assert found[0] == found[1]
    config = config_of(tmp_path / "run", run_dir, tokens, **GPTQ)
    marker = work_path(tmp_path / "run/small") / "model/marker"
    marker.touch()
    with model_folder(config) as folder:
        assert folder == marker.parent
        assert marker.exists()  # as a killed run left it
    older = run_dir / "checkpoints/step-00000005"
    with model_folder(config_of(tmp_path / "run", older, tokens, **GPTQ)) as folder:
        assert not marker.exists()  # another checkpoint
        parent = read_manifest(folder, kind="model").parents["checkpoint"]
    assert parent["fingerprint"] == read_manifest(older, kind="checkpoint").fingerprint


@pytest.mark.integration
def test_the_result_of_a_run_names_the_checkpoint_as_its_parent(run_dir: Path, tokens: Path, tmp_path: Path) -> None:
    fields = {**GPTQ, "consumers": ["transformers"], "max_mean_kl": 1.0}
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
        with model_folder(config_of(tmp_path, run, tokens, **{**GPTQ, **fields})):
            raise AssertionError("it was exported")

    with pytest.raises(CheckpointError, match="no finished checkpoint"):
        enter()
    assert not work_path(tmp_path / "small").exists()
    with pytest.raises(DataError, match="no such directory"):
        enter(data={"path": str(tmp_path / "nothing"), "sequence_length": 32})
    (tmp_path / "small").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        enter()
