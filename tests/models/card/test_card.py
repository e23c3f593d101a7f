"""The model card is in the folder before it is committed, and says what is in the manifest."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foundation.directory import read_manifest, sha256_of_file, verify, write_manifest
from pipeline.models.card.front_matter import front_matter_of
from pipeline.models.card.lineage import lineage_of, training_lineage
from tests import warm
from tests.compress.quantization.test_quantize import ENTRY, write_config
from tests.conftest import launch, tiny_config
from tests.conftest import write_config as write_run_config
from tests.support import output_of


@pytest.fixture(scope="module")
def exported(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("run")
    config = tiny_config(tokens, work / "run")
    config["run"]["steps"] = 6
    config.pop("scheduler")
    launch("train.py", write_run_config(work / "c.json", config), processes=1)
    facts = work / "facts.json"
    facts.write_text(json.dumps({"name": "example/river", "license": "mit"}))
    command = ["-m", "pipeline", "export", work / "run", work / "model", "--facts", facts]
    assert "llama.cpp" in output_of(warm.run(*command))
    return work / "model"


def test_an_export_has_a_card_that_its_manifest_lists(exported: Path, tokens: Path) -> None:
    manifest = read_manifest(exported, kind="model")
    assert "README.md" in manifest.files
    assert all(right for _, right in verify(exported, manifest))
    text = (exported / "README.md").read_text()
    assert f"`{sha256_of_file(exported / 'model.safetensors')}`" in text
    assert f"| optimizer steps | {manifest.details['step']} |" in text
    corpus = read_manifest(tokens, kind="tokens")
    assert corpus.fingerprint[:12] in text
    trained = manifest.details["lineage"]["steps"][-1]
    assert trained["tokens"] == trained["samples"] * trained["sequence_length"]
    assert f"| tokens seen | {trained['tokens']:,} |" in text
    assert str(exported.parent) not in text  # a card is published: no paths
    about = front_matter_of(text)
    assert about["library_name"] == "transformers"
    assert about["pipeline_tag"] == "text-generation"


def test_the_snippet_of_the_card_loads_the_folder(exported: Path) -> None:
    code = (exported / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "Once" in output_of(warm.run("-c", code.replace("FOLDER", str(exported))))


@pytest.mark.integration  # a quantization
def test_a_quantized_model_keeps_the_lineage_of_a_lost_source(exported: Path, tokens: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(exported, tmp_path / "source"))
    config = write_config(tmp_path, source, tokens, scheme="W8A16", consumers=["transformers"])
    output_of(warm.run(ENTRY, "--config", config))
    shutil.rmtree(source)
    manifest = read_manifest(tmp_path / "small", kind="model")
    steps = lineage_of(tmp_path / "small")["steps"]
    assert [step["step"] for step in steps] == ["training", "quantization"]
    assert steps[0] == lineage_of(exported)["steps"][0]
    assert steps[1]["mean_kl"]["transformers"] == manifest.details["consumers"]["transformers"]["mean_kl"]
    text = (tmp_path / "small" / "README.md").read_text()
    about = front_matter_of(text)
    assert {"W8A16", "compressed-tensors"} <= set(about["tags"])
    assert (about["license"], about["base_model"]) == ("mit", "example/river")
    assert "Model dependencies: example/river" in (tmp_path / "small" / "training-content-summary.md").read_text()
    (result,) = about["model-index"][0]["results"]
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert values["loss"] == manifest.details["after"]["loss_nats"]
    assert "vllm was not run:" in text
    assert all(right for _, right in verify(tmp_path / "small", manifest))


def test_a_folder_from_elsewhere_is_said_to_be_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert [step["step"] for step in lineage_of(tmp_path)["steps"]] == ["given"]


def test_a_manifest_without_a_lineage_is_followed_to_its_parents(exported: Path, tmp_path: Path) -> None:
    manifest = read_manifest(exported, kind="model")
    copied = Path(shutil.copytree(exported, tmp_path / "copied"))
    older = {key: value for key, value in manifest.details.items() if key != "lineage"}
    fields = {"config": manifest.config, "details": older, "files": manifest.files}
    write_manifest(copied, kind="model", parents=manifest.parents, **fields)
    assert lineage_of(copied) == lineage_of(exported)
    gone = {"checkpoint": {**manifest.parents["checkpoint"], "path": str(tmp_path / "nowhere")}}
    write_manifest(copied, kind="model", parents=gone, **fields)
    rebuilt = lineage_of(copied)
    assert rebuilt == {"corpora": [], "steps": [{"step": "training", "optimizer_steps": 6, "dtype": "float32"}]}


@pytest.mark.parametrize("changed", [{"weights": [None]}, {"schedule": [[3, [1.0]]]}])
def test_where_a_budget_or_curriculum_decides_no_weight_is_told(exported: Path, changed: dict[str, Any]) -> None:
    checkpoint = read_manifest(read_manifest(exported, kind="model").parents["checkpoint"]["path"], kind="checkpoint")
    assert training_lineage(checkpoint)["corpora"][0]["weight"] == 1.0
    curve = checkpoint.details["curve"]
    details = {**checkpoint.details, "curve": {**curve, "data": {**curve["data"], **changed}}}
    assert training_lineage(replace(checkpoint, details=details))["corpora"][0]["weight"] is None
