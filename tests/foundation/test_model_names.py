"""Names and files given as `model.path` are named as what they are; each remedy opens."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from transformers import LlamaConfig

from foundation.errors import ConfigError, DataError
from foundation.remote_folder import local_folder
from pipeline.config.rules.training import check_model
from pipeline.config.sections.run import ModelSection
from pipeline.models.folder.model_folder import ModelFolder, read_config
from tests.models.test_folders import SIZES, save
from tests.warm_python import python


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of huggingface_hub, with one model, in a host without a network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return save(tmp_path / "hub/models--org--tiny/snapshots/0a1b", LlamaConfig(**SIZES))


def test_a_name_of_the_hub_leads_to_its_url_and_to_the_copy_in_the_cache(hub: Path) -> None:
    with pytest.raises(DataError, match="looks like a name of the Hugging Face Hub") as refused:
        read_config(Path("org/tiny"))
    assert "try: use hf://org/tiny, or without a network " in str(refused.value)
    place = str(refused.value).partition("without a network ")[2].partition(",")[0]
    assert ModelFolder.open(place).path == hub
    with pytest.raises(DataError) as refused:
        read_config(Path("org/other"))
    assert str(refused.value).endswith("use hf://org/other")


def test_without_a_network_a_url_of_the_hub_leads_to_the_cache_or_a_download(hub: Path) -> None:
    with pytest.raises(DataError, match="cannot be listed") as refused:
        local_folder("hf://org/tiny")
    assert str(refused.value).endswith(f"try: use {hub}, its copy in the cache of huggingface_hub")
    with pytest.raises(DataError, match="try: where there is a network: hf download org/other --local-dir other;"):
        local_folder("hf://org/other")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_of_a_folder_leads_to_the_folder(name: str, hub: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        check_model(ModelSection(path=str(hub / name)), sequence_length=8)
    assert refused.value.field == "model.path"
    check_model(ModelSection(path=refused.value.remedy.removeprefix("use ")), sequence_length=8)
    with pytest.raises(DataError, match=f"try: use {hub}$"):
        read_config(hub / name)


def test_a_pickle_of_weights_is_not_opened_and_its_conversion_makes_a_folder(hub: Path) -> None:
    (hub / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="a pickle of PyTorch") as refused:
        check_model(ModelSection(path=str(hub / "pytorch_model.bin")), sequence_length=8)
    words = shlex.split(refused.value.remedy.partition(": ")[2].rpartition(", and OUT")[0])
    subprocess.run([python(), *words[1:]], check=True, capture_output=True)
    assert ModelFolder.open(Path("OUT")).config["model_type"] == "llama"
    with pytest.raises(ConfigError, match=r"a GGUF file[^^]*use the Hugging Face folder that it was converted from"):
        check_model(ModelSection(path="models/q4.gguf"), sequence_length=8)
