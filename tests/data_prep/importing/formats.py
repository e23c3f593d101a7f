"""The same documents as each tool leaves them: by the tool itself where it is installed, otherwise from its layout."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from data_prep.formats.tokenfile import TokenFileWriter
from tests.fixtures.foreign_tokens.make import HERE, documents

Ids = npt.NDArray[np.int64]
LLMC_HEADER = 256


def ended(eos: int) -> list[Ids]:
    """The documents, each with end-of-text behind it."""
    return [np.append(ids, eos) for ids in documents()]


def begun(eos: int) -> list[Ids]:
    """The documents, each with end-of-text before it."""
    return [np.append(eos, ids) for ids in documents()]


def litdata(_folder: Path, _eos: int) -> tuple[Path, list[Ids]]:
    """See tests/fixtures/foreign_tokens."""
    return HERE / "litdata", documents()


def litdata_zstd(_folder: Path, _eos: int) -> tuple[Path, list[Ids]]:
    """As `litdata`, compressed."""
    return HERE / "litdata-zstd", documents()


def mds(_folder: Path, _eos: int) -> tuple[Path, list[Ids]]:
    """A column of ndarray:int32; see tests/fixtures/foreign_tokens."""
    return HERE / "mds", documents()


def mds_zstd(_folder: Path, _eos: int) -> tuple[Path, list[Ids]]:
    """A column of bytes, compressed."""
    return HERE / "mds-zstd", documents()


def megatron(folder: Path, _eos: int) -> tuple[Path, list[Ids]]:
    """Megatron-LM's pair."""
    with TokenFileWriter(folder / "web", dtype=np.uint16) as writer:
        for ids in documents():
            writer.append(ids)
    return folder / "web", documents()


def datatrove(folder: Path, _eos: int) -> tuple[Path, list[Ids]]:
    """By datatrove's own writer, in two files."""
    tokens = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    for number, some in enumerate((documents()[:25], documents()[25:])):
        about = {"tokenizer_name_or_path": "gpt2", "save_final_metadata": True, "token_size": 2}
        file = tokens.TokenizedFile(str(folder), f"{number:05d}_unshuffled.ds", **about)
        for ids in some:
            file.write(ids.tolist(), None)
        file.close()
    return folder, documents()


def datatrove_flat(folder: Path, eos: int) -> tuple[Path, list[Ids]]:
    """What datatrove leaves with save_index=False: ids alone, end-of-text behind each document."""
    np.concatenate(ended(eos)).astype(np.uint16).tofile(folder / "00000_unshuffled.ds")
    return folder, ended(eos)


def olmo(folder: Path, eos: int) -> tuple[Path, list[Ids]]:
    """As `MemmapWriter` of dolma does (python/dolma/tokenizer/memmap_writer.py), with metadata."""
    flat = np.concatenate(ended(eos)).astype(np.uint16)
    flat.tofile(folder / "part-0-00000.npy")
    ends = np.cumsum([len(ids) for ids in ended(eos)])
    with gzip.open(folder / "part-0-00000.csv.gz", "wt", newline="") as file:
        rows = zip([0, *ends[:-1]], ends, strict=True)
        csv.writer(file).writerows(
            [start, end, f"id,{start}", "src.jsonl.gz", n] for n, (start, end) in enumerate(rows)
        )
    return folder, ended(eos)


def olmo_uint32(folder: Path, eos: int) -> tuple[Path, list[Ids]]:
    """As the guide of OLMo-core does (docs/source/guides/data_loading.rst): uint32, no metadata."""
    np.concatenate(ended(eos)).astype(np.uint32).tofile(folder / "data001.npy")
    return folder, ended(eos)


def llmc(folder: Path, eos: int) -> tuple[Path, list[Ids]]:
    """As `write_datafile` of llm.c does (dev/data/data_common.py), in two files."""
    for name, some in (("fineweb_train_000001", begun(eos)[:30]), ("fineweb_train_000002", begun(eos)[30:])):
        write_llmc(folder / f"{name}.bin", np.concatenate(some))
    return folder, begun(eos)


def llmc_llama(folder: Path, eos: int) -> tuple[Path, list[Ids]]:
    """llm.c's layout for Llama 3: another magic and version, uint32."""
    write_llmc(folder / "web_train_000001.bin", np.concatenate(begun(eos)), magic=20240801, version=7)
    return folder, begun(eos)


def write_llmc(path: Path, ids: Ids, *, magic: int = 20240520, version: int = 1) -> None:
    """A file of llm.c."""
    header = np.zeros(LLMC_HEADER, dtype="<i4")
    header[:3] = magic, version, ids.size
    path.write_bytes(header.tobytes() + ids.astype("<u2" if magic == 20240520 else "<u4").tobytes())


def nanogpt(folder: Path, eos: int) -> tuple[Path, list[Ids]]:
    """As data/openwebtext/prepare.py of nanoGPT does: uint16, end-of-text behind each document."""
    np.concatenate(ended(eos)).astype(np.uint16).tofile(folder / "train.bin")
    return folder, ended(eos)


def numpy_saved(folder: Path, eos: int) -> tuple[Path, list[Ids]]:
    """As fineweb.py of build-nanogpt does: np.save, end-of-text before each document; here in big-endian order."""
    np.save(folder / "edufineweb_train_000001.npy", np.concatenate(begun(eos)).astype(">u2"))
    return folder, begun(eos)


def saved(folder: Path, _eos: int) -> tuple[Path, list[Ids]]:
    """By datasets' save_to_disk, in two files."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"input_ids": [ids.tolist() for ids in documents()]})
    rows.save_to_disk(str(folder / "saved"), num_shards=2)
    return folder / "saved", documents()


def parquet(folder: Path, _eos: int) -> tuple[Path, list[Ids]]:
    """By datasets' to_parquet, compressed."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"input_ids": [ids.tolist() for ids in documents()]})
    rows.to_parquet(str(folder / "train-00000-of-00001.parquet"))
    return folder, documents()


FORMATS: dict[str, Callable[[Path, int], tuple[Path, list[Ids]]]] = {
    each.__name__: each
    for each in (
        *(litdata, litdata_zstd, mds, mds_zstd, megatron, datatrove, datatrove_flat, olmo, olmo_uint32),
        *(llmc, llmc_llama, nanogpt, numpy_saved, saved, parquet),
    )
}
