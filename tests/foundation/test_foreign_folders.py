"""Folders of other tools are named with their remedy wherever a folder is opened; damaged JSON files are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.importing import arrow_rows, chunk_files
from data_prep.sources import saved
from data_prep.tokenizer import load
from foundation.directory import kind_of, read_manifest
from foundation.errors import CheckpointError, DataError, HeadraceError
from foundation.foreign_folders import KINDS, recognise
from pipeline.checkpoint.export.find import find_checkpoint
from pipeline.checkpoint.importing import megatron, trainer_folder
from pipeline.models.folder import beside_weights, model_folder, text_part, weight_files
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.split_names import pre_tokenizer
from pipeline.runtime.faults.report import read_faults

FOLDERS = {
    "a checkpoint of DeepSpeed (ZeRO)": (
        "latest",
        "zero_to_fp32.py",
        "global_step9/mp_rank_00_model_states.pt",
        "global_step9/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ),
    "a checkpoint of DeepSpeed (ZeRO), of one step": ("zero_pp_rank_0_mp_rank_00_optim_states.pt",),
    "a universal checkpoint of DeepSpeed": ("mp_rank_00_model_states.pt", "zero/lm_head.weight/fp32.pt"),
    "a folder of universal checkpoints of DeepSpeed": ("latest_universal", "global_step9_universal/zero/x/fp32.pt"),
    "a checkpoint of DeepSpeed without ZeRO": ("latest", "global_step9/mp_rank_00_model_states.pt"),
    "a checkpoint of Megatron-LM (torch)": ("iter_0000100/mp_rank_00/model_optim_rng.pt",),
    "checkpoints of Megatron-LM": ("latest_checkpointed_iteration.txt", "iter_0000100/__0_0.distcp"),
    "a distributed checkpoint of torch (DCP)": (".metadata", "__0_0.distcp"),
    "a folder of checkpoints of torchtitan": ("step-10/.metadata", "step-10/__0_0.distcp"),
    "the output folder of the Hugging Face Trainer": ("checkpoint-9/trainer_state.json", "training_args.bin"),
    "a checkpoint of the Hugging Face Trainer": ("trainer_state.json", "optimizer.pt"),
    "a checkpoint of accelerate (save_state)": ("optimizer.bin", "model.safetensors", "random_states_0.pkl"),
    "a checkpoint of accelerate (save_state), FSDP": ("optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata"),
    "a folder of chunks of litdata": ("index.json", "chunk-0-0.bin"),
    "a folder of chunks of litdata, by split": ("train/index.json", "train/chunk-0-0.bin"),
    "a folder of MDS shards of MosaicML streaming": ("index.json", "shard.00000.mds.zstd"),
    "a folder of MDS shards of MosaicML streaming, by split": ("val/index.json", "val/shard.00000.mds"),
    "a dataset of datasets.save_to_disk": ("dataset_info.json", "state.json", "data-00000-of-00001.arrow"),
    "a dataset of datasets.save_to_disk, by split": ("dataset_dict.json", "train/dataset_info.json"),
    "tokens of datatrove or nanotron": ("00000_tokens.ds", "00000_tokens.ds.index", "00000_tokens.ds.metadata"),
    "tokens of datatrove or nanotron without an index": ("00000_tokens.ds",),
    "a checkpoint of nanoGPT": ("ckpt.pt",),
    "tokens of llm.c": ("fineweb_train_000001.bin", "fineweb_val_000000.bin"),
    "tokens of nanoGPT": ("train.bin", "val.bin", "meta.pkl"),
    "tokens of OLMo (flat .npy)": ("part-0-00000.npy",),
    "tokens of Megatron-LM": ("web_text_document.bin", "web_text_document.idx"),
    "a checkpoint of nanotron": ("checkpoint_metadata.json", "model/model_config.json"),
    "a checkpoint of OLMo-core": ("config.json", "model_and_optim/.metadata"),
    "a Hugging Face model folder": ("config.json", "model-00001-of-00002.safetensors"),
    "a folder of Parquet files": ("train-00000-of-00001.parquet",),
    "a tokens directory of headrace": ("manifest.json", "tokenizer/tokenizer.json"),
}
DAMAGED = {
    "nested too deeply": b"[" * 100_000,
    "objects nested too deeply": b'{"weight_map":' * 100_000,
    "no object": b'["chunks"]',
    "another encoding": '{"kind": "tokens"}'.encode("utf-16"),
    "truncated": b'{"kind": "tok',
}
READERS: dict[str, Callable[[Path], object]] = {
    "manifest.json": lambda folder: read_manifest(folder, kind="tokens"),
    "config.json": model_folder.read_config,
    "config.json of its text": lambda folder: text_part.text_is_nested(folder, "llama"),
    "generation_config.json": beside_weights.read_generation,
    "model.safetensors.index.json": weight_files.stored_tensors,
    "tokenizer.json": pre_tokenizer,
    "tokenizer_config.json": load.read_config,
    "trainer_state.json": trainer_folder._step,
    "metadata.json": megatron._newest,
    "state.json": arrow_rows.open_saved,
    "state.json of a source": lambda folder: saved.saved_files(str(folder), None, at="data.sources.0"),
    "dataset_dict.json": lambda folder: saved.saved_files(str(folder), None, at="data.sources.0"),
}


def made(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_every_kind_of_the_table_is_tried(tmp_path: Path) -> None:
    found = [recognise(made(tmp_path / str(n), names)) for n, names in enumerate(FOLDERS.values())]
    assert [(each.name, each.marks) for each in found if each] == [(kind.name, kind.marks) for kind in KINDS]


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_of_another_tool_is_named_with_a_remedy(kind: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "given", FOLDERS[kind])
    found = recognise(folder)
    assert found is not None
    assert kind.startswith(found.name)
    assert "FOLDER" not in found.remedy
    if "manifest.json" not in FOLDERS[kind]:
        with pytest.raises(DataError, match=r"; it is (a|the|tokens|checkpoints) ") as refused:
            read_manifest(folder, kind="tokens")
        assert found.remedy in str(refused.value)
    if "config.json" not in FOLDERS[kind]:
        with pytest.raises(DataError) as as_model:
            ModelFolder.open(folder)
        assert found.remedy in str(as_model.value)
    with pytest.raises(CheckpointError) as as_run:
        find_checkpoint(folder)
    assert found.remedy in str(as_run.value)


def test_a_file_of_tokens_is_named(tmp_path: Path) -> None:
    (tmp_path / "part-0.npy").touch()
    with pytest.raises(DataError, match="it is tokens of OLMo"):
        read_manifest(tmp_path / "part-0.npy", kind="tokens")


def test_what_is_not_known_is_not_guessed(tmp_path: Path) -> None:
    assert recognise(made(tmp_path / "a", ("notes.txt", "data.bin", "x/y.pt"))) is None
    assert recognise(tmp_path / "nothing") is None
    with pytest.raises(DataError, match="make one with: headrace prep"):
        read_manifest(tmp_path / "a", kind="tokens")


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside"])
def test_no_index_of_another_tool_leads_out_of_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "outside").touch()
    folder = made(tmp_path / "there", ("state.json",))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    litdata = {"config": {"data_format": ["no_header_tensor:11"], "compression": None}}
    litdata |= {"chunks": [{"filename": name, "chunk_bytes": 1, "chunk_size": 1, "dim": 1}]}
    raw = {"basename": name, "bytes": 1}
    mds = {
        "format": "mds",
        "column_names": ["tokens"],
        "column_encodings": ["bytes"],
        "zip_data": None,
        "raw_data": raw,
    }
    opening = {
        "state": lambda: arrow_rows.open_saved(folder),
        "saved": lambda: saved.saved_files(str(folder), None, at="sources.0"),
        "litdata": lambda: chunk_files.open_litdata(folder, litdata),
        "mds": lambda: chunk_files.open_mds(folder, {"shards": [mds]}, dtype=None),
    }
    for open_it in opening.values():
        with pytest.raises(DataError, match=r"json names .*, which is not in the folder: refused"):
            open_it()


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_named_by_its_reader(reader: str, damage: str, tmp_path: Path) -> None:
    name = reader.partition(" ")[0]
    (tmp_path / name).write_bytes(DAMAGED[damage])
    with pytest.raises(HeadraceError, match=rf"{tmp_path}/{name} is damaged: .*\n  try: "):
        READERS[reader](tmp_path)


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_beside_others_is_passed_over(damage: str, tmp_path: Path) -> None:
    for name in ("manifest.json", "adapter_config.json", "index.json", "faults.jsonl"):
        (tmp_path / name).write_bytes(DAMAGED[damage])
    assert kind_of(tmp_path) is None
    assert read_faults(tmp_path) == ([{"kind": "tokens"}] if damage == "another encoding" else [])  # it has no newline
    with pytest.raises(HeadraceError, match=r"an adapter .* of BASE"):
        weight_files.refuse_adapter(tmp_path)
    if damage == "no object":  # of a tool that is not known here
        assert chunk_files.read_index(tmp_path) == {}
    else:
        with pytest.raises(HeadraceError, match=r"index.json is damaged"):
            chunk_files.read_index(tmp_path)
