"""JSON that others have written: what is damaged is named, and no reader ends with a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.importing import arrow_rows, chunk_files
from data_prep.sources import saved
from data_prep.tokenizer import load
from headrace.base.directory import kind_of, read_manifest
from headrace.base.errors import HeadraceError
from pipeline.checkpoint.importing import megatron, trainer_folder
from pipeline.models.folder import beside_weights, model_folder, text_part, weight_files
from pipeline.models.split_names import pre_tokenizer
from pipeline.runtime.faults.report import read_faults

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
