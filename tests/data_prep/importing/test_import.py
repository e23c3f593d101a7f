"""Tokens of other tools become a tokens directory with the same ids and documents; what cannot is refused before."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.formats.maskfile import open_mask
from data_prep.formats.tokenfile import TokenFile, TokenFileWriter
from data_prep.importing import command
from data_prep.importing.command import StatedFacts, import_tokens
from data_prep.tokenizer.load import describe
from foundation.directory import Manifest, read_manifest, verify
from foundation.errors import ConfigError, DataError, HeadraceError
from tests import warm
from tests.data_prep.importing.formats import FORMATS, Ids, begun, ended, llmc, write_llmc
from tests.fixtures.foreign_tokens.make import HERE, documents
from tests.support import output_of


@pytest.fixture(scope="module")
def tokenizer(tokens: Path) -> Path:
    return tokens / "tokenizer"


@pytest.fixture(scope="module")
def eos(tokenizer: Path) -> int:
    return int(describe(tokenizer, kind="given")["eos_id"])


def read(out: Path, split: str = "train") -> list[list[int]]:
    """The documents of a split."""
    shards = read_manifest(out, kind="tokens").details["splits"][split]["shards"]
    found = []
    for shard in shards:
        file = TokenFile.open(out / split / shard["name"])
        found += [part.tolist() for part in np.split(file.tokens, file.document_starts(np.arange(1, file.documents)))]
    return found


def lists(some: list[Ids]) -> list[list[int]]:
    return [ids.tolist() for ids in some]


def options(name: str) -> dict[str, Any]:
    return {"choices": StatedFacts(dtype="uint32")} if name == "olmo_uint32" else {}


@pytest.mark.parametrize("name", FORMATS)
def test_ids_and_documents_are_those_that_were_written(name: str, tokenizer: Path, eos: int, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    folder, written = FORMATS[name](tmp_path / "in", eos)
    manifest = import_tokens(folder, tmp_path / "out", tokenizer=tokenizer, **options(name))
    assert read(tmp_path / "out") == lists(written)
    assert all(good for _, good in verify(tmp_path / "out", manifest))
    with TokenFileWriter(tmp_path / "by_hand", dtype=np.uint16) as writer:
        for ids in written:
            writer.append(ids)
        sums = writer.close()
    # the same bytes: a run on them has the losses of a run on the same tokens from data prep
    assert {suffix: manifest.files[f"train/shard-00000{suffix}"]["sha256"] for suffix in sums} == sums
    entry = manifest.details["splits"]["train"]
    assert (entry["documents"], entry["tokens"]) == (len(written), sum(map(len, written)))
    assert manifest.details["tokenizer"] == describe(tokenizer, kind="given")
    assert manifest.details["imported"]["made_with"] == ("gpt2" if name == "datatrove" else None)


def test_workers_and_shards_do_not_change_the_documents(
    tokenizer: Path, eos: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    folder, written = llmc(tmp_path / "in", eos)
    monkeypatch.setattr(command, "_SHARD_BYTES", 1)
    monkeypatch.setattr(command, "_WORKER_BYTES", 1)
    manifest = import_tokens(folder, tmp_path / "out", tokenizer=tokenizer, workers=2)
    assert len(manifest.details["splits"]["train"]["shards"]) > 1
    assert read(tmp_path / "out") == lists(written)


def test_blocks_do_not_cut_documents(
    tokenizer: Path, eos: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("documents", "flat_arrays", "chunk_files"):
        monkeypatch.setattr(f"data_prep.importing.{module}.BLOCK_TOKENS", 64)
    for name in ("litdata", "mds", "megatron", "olmo", "llmc", "nanogpt"):
        (tmp_path / name).mkdir()
        folder, written = FORMATS[name](tmp_path / name, eos)
        import_tokens(folder, tmp_path / f"{name}.out", tokenizer=tokenizer)
        assert read(tmp_path / f"{name}.out") == lists(written), name


def rows_of(folder: Path, **columns: list[Any]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder))
    return folder


def test_labels_and_padding_become_a_loss_mask(tokenizer: Path, tmp_path: Path) -> None:
    folder = rows_of(
        tmp_path / "rows",
        input_ids=[[5, 6, 7, 0, 0], [8, 9], [4, 4, 4]],
        labels=[[-100, 6, 7, -100, -100], [8, -100], [4, 4, 4]],
        attention_mask=[[1, 1, 1, 0, 0], [1, 1], [1, 1, 1]],
        completion_mask=[[0, 0, 1, 0, 0], [1, 1], [1, 1, 1]],
        position_ids=[[0, 1, 2, 0, 0], [0, 1], [0, 1, 2]],
    )
    manifest = import_tokens(folder, tmp_path / "out", tokenizer=tokenizer)
    assert read(tmp_path / "out") == [[5, 6, 7], [8, 9], [4, 4, 4]]
    mask = open_mask(tmp_path / "out/train/shard-00000", tokens=8)
    assert mask is not None
    assert mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 1]
    assert manifest.details["imported"]["left_out"] == ["column position_ids"]


def test_rows_that_are_windows_are_asked_about_and_joined(tokenizer: Path, eos: int, tmp_path: Path) -> None:
    flat = np.concatenate(ended(eos))
    windows = flat[: flat.size // 32 * 32].reshape(-1, 32).tolist()
    folder = rows_of(tmp_path / "rows", input_ids=windows)
    with pytest.raises(ConfigError, match=r"--borders\n.*every row of .* has 32 tokens"):
        import_tokens(folder, tmp_path / "out", tokenizer=tokenizer)
    import_tokens(folder, tmp_path / "out", tokenizer=tokenizer, choices=StatedFacts(borders="eos"))
    *whole, last = read(tmp_path / "out")
    assert whole == lists(ended(eos))[: len(whole)]
    assert last == flat[sum(map(len, whole)) : flat.size // 32 * 32].tolist()
    import_tokens(folder, tmp_path / "rows.out", tokenizer=tokenizer, choices=StatedFacts(borders="format"))
    assert read(tmp_path / "rows.out") == windows


def test_files_named_val_are_held_out_and_test_is_left_out(tokenizer: Path, eos: int, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {"train": [[5, 6, 7], [9, 9]], "validation": [[8, 8, 8, 8]], "test": [[1, 2]]}
    saved = datasets.DatasetDict({k: datasets.Dataset.from_dict({"input_ids": rows}) for k, rows in splits.items()})
    saved.save_to_disk(str(tmp_path / "dict"))
    manifest = import_tokens(tmp_path / "dict", tmp_path / "out", tokenizer=tokenizer)
    assert (read(tmp_path / "out"), read(tmp_path / "out", "heldout")) == (splits["train"], splits["validation"])
    assert manifest.details["imported"]["left_out"] == ["test (a test split)"]
    assert manifest.details["splits"]["heldout"]["bytes"] > 0
    (tmp_path / "llmc").mkdir()
    llmc(tmp_path / "llmc", eos)
    write_llmc(tmp_path / "llmc/fineweb_val_000000.bin", np.array([eos, 7, 7]))
    import_tokens(tmp_path / "llmc", tmp_path / "llmc.out", tokenizer=tokenizer)
    assert (read(tmp_path / "llmc.out"), read(tmp_path / "llmc.out", "heldout")) == (lists(begun(eos)), [[eos, 7, 7]])
    for name in ("train", "other"):
        shutil.copytree(HERE / "mds", tmp_path / "mds" / name)
    both: dict[str, Any] = {"tokenizer": tokenizer, "heldout": tmp_path / "mds/other"}
    import_tokens(tmp_path / "mds/train", tmp_path / "mds.out", **both)
    assert read(tmp_path / "mds.out", "heldout") == lists(documents())


def test_a_file_without_end_of_text_is_one_document_if_that_is_said(tokenizer: Path, tmp_path: Path) -> None:
    np.concatenate(documents()).astype(np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(ConfigError, match=r"does not occur in the first 1,790 tokens of .*train\.bin"):
        import_tokens(tmp_path, tmp_path / "out", tokenizer=tokenizer, choices=StatedFacts(eos_id=3))
    import_tokens(tmp_path, tmp_path / "out", tokenizer=tokenizer, choices=StatedFacts(borders="none"))
    assert read(tmp_path / "out") == [np.concatenate(documents()).tolist()]


def test_the_command_says_what_was_done_and_needs_no_torch_for_help(tokenizer: Path, tmp_path: Path) -> None:
    words = ("-m", "headrace", "import", HERE / "mds", tmp_path / "out", "--tokenizer", tokenizer)
    said = output_of(warm.run(*words))
    assert "MosaicML streaming, documents by its own record" in said
    assert "the tokens record none: nothing to compare" in said
    assert "not read: column id" in said
    assert "   train: 60 documents, 1,790 tokens, 1 shards" in said


def edited(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def cut(path: Path, size: int = -2) -> None:
    path.write_bytes(path.read_bytes()[:size])


def in_index(folder: Path, *keys: str | int, value: object) -> None:
    index = json.loads((folder / "index.json").read_text())
    at = index
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    (folder / "index.json").write_text(json.dumps(index))


def second(folder: Path, name: str, dtype: str) -> None:
    np.save(folder / name, np.zeros(9, dtype))


BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "litdata: a chunk that is cut off": (
        "litdata",
        lambda f: cut(f / "chunk-0-1.bin"),
        r"chunk-0-1\.bin has 1606 bytes",
    ),
    "litdata: a missing chunk": ("litdata", lambda f: (f / "chunk-0-2.bin").unlink(), r"chunk-0-2\.bin is missing"),
    "litdata: another number of samples": (
        "litdata",
        lambda f: in_index(f, "chunks", 0, "chunk_size", value=24),
        r"chunk-0-0\.bin has 25 samples up to byte \d+, and index\.json says 24",
    ),
    "litdata: text": (
        "litdata",
        lambda f: in_index(f, "config", "data_format", value=["str"]),
        r"index\.json has samples in the format \['str'\]; ids are one tensor",
    ),
    "litdata: another codec": (
        "litdata_zstd",
        lambda f: in_index(f, "config", "compression", value="lz5"),
        r"is compressed with lz5, which is not known",
    ),
    "litdata: damaged zstd": (
        "litdata_zstd",
        lambda f: (f / "chunk-0-0.zstd.bin").write_bytes(b"0" * 99),
        r"chunk-0-0\.zstd\.bin is damaged \(zstd\)",
    ),
    "MDS: a shard that is cut off": ("mds", lambda f: cut(f / "shard.00001.mds"), r"shard\.00001\.mds has 3872 bytes"),
    "MDS: no ids": (
        "mds",
        lambda f: in_index(f, "shards", 0, "column_names", value=["id", "text"]),
        r"has the columns id, text, and none is input_ids or tokens",
    ),
    "MDS: another encoding": (
        "mds",
        lambda f: in_index(f, "shards", 0, "column_encodings", value=["int", "str"]),
        r"column tokens has the encoding str; token ids are bytes or ndarray",
    ),
    "MDS: a damaged index": ("mds", lambda f: cut(f / "index.json"), r"index\.json is damaged"),
    "OLMo: ends of other tokens": ("olmo", lambda f: cut(f / "part-0-00000.npy"), r"csv\.gz has documents up to token"),
    "OLMo: half an id": ("olmo", lambda f: cut(f / "part-0-00000.npy", -1), r"no whole number of ids of 2 bytes"),
    "OLMo: damaged metadata": (
        "olmo",
        lambda f: (f / "part-0-00000.csv.gz").write_bytes(gzip.compress(b"a,b\n")),
        r"csv\.gz is damaged",
    ),
    "OLMo: some files without metadata": (
        "olmo",
        lambda f: np.zeros(9, np.uint16).tofile(f / "part-1.npy"),
        r"more than one documents' ends",
    ),
    "OLMo: uint32 taken for uint16": (
        "olmo_uint32",
        lambda _f: None,
        r"every second uint16 of .* is zero: its ids are uint32\n.*--dtype uint32",
    ),
    "numpy: two dtypes": (
        "numpy_saved",
        lambda f: second(f, "x.npy", "<u4"),
        r"more than one dtype: >u2 in .* and <u4 in x\.npy",
    ),
    "numpy: floats": ("numpy_saved", lambda f: second(f, "a.npy", "<f4"), r"a\.npy is an array of float32"),
    "llm.c: cut off": ("llmc", lambda f: cut(f / "fineweb_train_000001.bin"), r"000001\.bin has \d+ bytes.* truncated"),
    "llm.c: another magic": (
        "llmc",
        lambda f: write_llmc(f / "fineweb_train_000002.bin", np.arange(9), magic=20250401),
        r"000002\.bin has a header like llm\.c's with the magic 20250401; known are 20240520, 20240801",
    ),
    "llm.c: another version": (
        "llmc",
        lambda f: write_llmc(f / "fineweb_train_000002.bin", np.arange(9), version=2),
        r"has version 2 of magic 20240520; known is 1",
    ),
    "llm.c: an evaluation file": (
        "llmc",
        lambda f: write_llmc(f / "fineweb_train_000002.bin", np.arange(9), magic=20240522),
        r"is an evaluation file of llm\.c",
    ),
    "llm.c: big-endian": (
        "llmc",
        lambda f: (f / "fineweb_train_000002.bin").write_bytes(np.full(256, 20240520, ">i4").tobytes()),
        r"big-endian byte order",
    ),
    "datasets: a missing file": (
        "saved",
        lambda f: next(f.glob("data-00001*")).unlink(),
        r"data-00001.* is missing, and .*state\.json lists it",
    ),
    "datasets: a file that is cut off": (
        "saved",
        lambda f: cut(next(f.glob("data-00000*")), 100),
        r"data-00000.* is damaged",
    ),
    "datasets: rows by indices": (
        "saved",
        lambda f: edited(f / "state.json", _indices_data_files=[{"filename": "indices.arrow"}]),
        r"selects rows by indices",
    ),
    "Parquet: cut off": ("parquet", lambda f: cut(next(f.glob("*.parquet"))), r"\.parquet is damaged"),
    "datatrove: no index": (
        "datatrove",
        lambda f: (f / "00001_unshuffled.ds.index").unlink(),
        r"00001_unshuffled\.ds\.index is missing: the \.ds file is not finished",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_is_written(case: str, tokenizer: Path, eos: int, tmp_path: Path) -> None:
    name, damage, message = BAD[case]
    (tmp_path / "in").mkdir()
    folder, _ = FORMATS[name](tmp_path / "in", eos)
    if folder.is_relative_to(HERE):
        folder = shutil.copytree(folder, tmp_path / "in" / name)
    damage(folder)
    with pytest.raises(HeadraceError, match=message):
        import_tokens(folder, tmp_path / "out", tokenizer=tokenizer)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


@pytest.mark.parametrize(
    ("bad", "message"), [([8, 600], "the id 600 as token 1,791"), ([-3], "the id -3 as token 1,790")]
)
def test_an_id_beyond_the_vocabulary_is_named_and_leaves_nothing(
    tokenizer: Path, tmp_path: Path, bad: list[int], message: str
) -> None:
    folder = rows_of(tmp_path / "rows", input_ids=[*lists(documents()), bad])
    with pytest.raises(DataError, match=message):
        import_tokens(folder, tmp_path / "out", tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


def test_labels_that_are_shifted_or_of_another_length_are_refused_with_their_row(
    tokenizer: Path, tmp_path: Path
) -> None:
    shifted = rows_of(tmp_path / "a", input_ids=[[5, 5], [5, 6, 7]], labels=[[5, 5], [6, 7, -100]])
    with pytest.raises(DataError, match="row 1 has the label 6 for the id 5: labels are -100 or the id"):
        import_tokens(shifted, tmp_path / "out", tokenizer=tokenizer)
    short = rows_of(tmp_path / "b", input_ids=[[5, 5], [5, 6, 7]], loss_mask=[[1, 1], [1, 1]])
    with pytest.raises(DataError, match="row 1 has 3 ids and 2 values of loss_mask"):
        import_tokens(short, tmp_path / "out", tokenizer=tokenizer)


def test_what_is_no_folder_of_tokens_is_refused(tokenizer: Path, tokens: Path, tmp_path: Path) -> None:
    def refused(path: Path, match: str, **given: Any) -> None:
        with pytest.raises(HeadraceError, match=match):
            import_tokens(path, tmp_path / "out", tokenizer=tokenizer, **given)

    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("a")
    refused(tmp_path / "nothing", "there is no such file or folder")
    refused(tmp_path / "text", "holds no tokens in a known format")
    refused(tokens, "it is a directory of headrace")
    for name in ("mds", "litdata"):
        shutil.copytree(HERE / name, tmp_path / "both" / name)
    refused(tmp_path / "both", "holds MosaicML streaming and litdata")
    refused(
        HERE / "mds",
        r"--dtype = 'uint16'\n.*ndarray:int32, which records the dtype",
        choices=StatedFacts(dtype="uint16"),
    )
    refused(HERE / "litdata", "litdata, which records the dtype", choices=StatedFacts(dtype="uint16"))
    refused(HERE / "mds", r"--heldout", heldout=HERE / "litdata")
    shutil.copytree(HERE / "mds", tmp_path / "held/val")
    refused(tmp_path / "held", "no training tokens: shard.00000.mds is held out by its name")
    np.zeros(9, np.uint16).tofile(tmp_path / "text/train.bin")
    refused(tmp_path / "text", "nanoGPT does not record where documents end", choices=StatedFacts(borders="format"))
    import_tokens(HERE / "mds", tmp_path / "out", tokenizer=tokenizer)
    refused(HERE / "mds", "out exists already")


def test_a_tokenizer_without_end_of_text_needs_an_id(tokenizer: Path, eos: int, tmp_path: Path) -> None:
    bare = shutil.copytree(tokenizer, tmp_path / "bare")
    edited(bare / "tokenizer_config.json", eos_token=None)
    np.concatenate(ended(eos)).astype(np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(ConfigError, match=r"--eos-id\n.*records no document borders"):
        import_tokens(tmp_path / "train.bin", tmp_path / "out", tokenizer=bare)
    import_tokens(tmp_path / "train.bin", tmp_path / "out", tokenizer=bare, choices=StatedFacts(eos_id=eos))
    assert read(tmp_path / "out") == lists(ended(eos))


def test_a_tokenizer_that_is_not_the_one_that_the_tokens_name_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    writer = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    other = shutil.copytree(tokenizer, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 512, "content": "<|more|>"})
    (other / "tokenizer.json").write_text(json.dumps(content))
    about = {"tokenizer_name_or_path": str(other / "tokenizer.json"), "save_final_metadata": True}
    file = writer.TokenizedFile(str(tmp_path / "ds"), "a.ds", **about)
    file.write([5, 6], None)
    file.close()
    with pytest.raises(ConfigError, match=r"--tokenizer.*\n.*which is another tokenizer"):
        import_tokens(tmp_path / "ds", tmp_path / "out", tokenizer=tokenizer)
    found: Manifest = import_tokens(tmp_path / "ds", tmp_path / "out", tokenizer=other)
    assert found.details["imported"]["made_with"] == str(other / "tokenizer.json")
