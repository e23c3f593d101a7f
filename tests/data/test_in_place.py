"""datatrove's files are read in place: ids, documents, loss masks, order and refusals; and a run on imported tokens."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from data_prep.formats.tokenfile import TokenFileWriter
from data_prep.importing.command import import_tokens
from data_prep.tokenizer.load import describe
from foundation.directory import commit, fresh_staging
from foundation.errors import ConfigError, DataError, HeadraceError
from foundation.section import parse
from pipeline.config.sections.data import DataSection
from pipeline.data.mixture import DataMixture, open_heldout, open_mixture
from pipeline.data.trained_sample import document_slices
from tests.conftest import launch, losses, tiny_config, write_config
from tests.fixtures.foreign_tokens.make import HERE, documents

T = 16
tokenized = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")


def write_ds(folder: Path, parts: list[list[list[int]]], *, loss: list[int] | None = None, width: int = 2) -> Path:
    """A folder of datatrove's own writer, a file for each part; `loss`: of every document, by position."""
    for number, some in enumerate(parts):
        about = {"tokenizer_name_or_path": "gpt2", "save_final_metadata": True, "token_size": width}
        file = tokenized.TokenizedFile(
            str(folder), f"{number:05d}_tokens.ds", save_loss_metadata=loss is not None, **about
        )
        for ids in some:
            file.write(ids, None if loss is None else np.resize(loss, len(ids)))
        file.close()
    return folder


def opened(path: Path, tokens: Path, **source: object) -> DataMixture:
    sources = [{"path": str(path), "tokenizer": str(tokens / "tokenizer"), **source}]
    return open_mixture(parse(DataSection, {"sources": sources, "sequence_length": T}), seed=5)


def lists() -> list[list[int]]:
    return [ids.tolist() for ids in documents()]


@pytest.mark.parametrize("width", [2, 4])
def test_ids_and_document_borders_are_those_that_were_written(tokens: Path, tmp_path: Path, width: int) -> None:
    parts = [lists()[:25], [], [lists()[25], [], *lists()[26:]]]  # a task without text leaves an empty file
    folder = write_ds(tmp_path / "ds", parts, width=width)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    (dataset,) = opened(folder, tokens).sources
    rows, number = dataset.read(np.arange(dataset.windows)), 0
    for part in parts:
        flat = [i for ids in part for i in ids]
        windows = max(0, (len(flat) - 1) // T)
        mine = np.arange(number, number + windows)
        assert rows[mine, :-1].ravel().tolist() == flat[: windows * T]
        boundaries = dataset.boundaries(mine)
        found = {int(s) * T + int(at) for s, at in zip(boundaries.sample, boundaries.at, strict=True)}
        assert found == {int(at) for at in np.cumsum([len(ids) for ids in part]) if at <= windows * T}
        number += windows
    assert number == dataset.windows
    whole = lists()
    for window in range(dataset.windows):
        for piece in document_slices(dataset, window):
            # the empty document between the 26th and 27th counts
            ids = whole[piece.document - (piece.document > 26)]
            assert piece.tokens.tolist() == ids[piece.first : piece.first + piece.tokens.size]
            assert piece.length == len(ids)
    assert {path: path.read_bytes() for path in folder.iterdir()} == files
    assert "of the tokenizer gpt2" in dataset.summary


def test_what_the_document_tokenizer_of_datatrove_writes_is_read(tokens: Path, tmp_path: Path) -> None:
    from datatrove.data import Document  # noqa: PLC0415

    name = str(tokens / "tokenizer/tokenizer.json")
    texts = [f"water {i} turns the mill wheel " * (1 + i % 5) for i in range(40)]
    step = tokenized.DocumentTokenizer(str(tmp_path / "ds"), name, shuffle_documents=True, seed=3)
    step.run([Document(text=text, id=str(i)) for i, text in enumerate(texts)])
    (dataset,) = opened(tmp_path / "ds", tokens).sources
    file = dataset.file(0)
    starts = file.document_starts(np.arange(len(texts) + 1))
    found = [file.tokens[a:b].tolist() for a, b in pairwise(starts)]
    known = Tokenizer.from_file(name)
    assert sorted(found) == sorted(known.encode(text).ids for text in texts)


def test_its_loss_mask_is_read(tokens: Path, tmp_path: Path) -> None:
    folder = write_ds(tmp_path / "ds", [lists()], loss=[0, 1, 1])
    (dataset,) = opened(folder, tokens).sources
    expected = np.concatenate([np.resize([False, True, True], len(ids)) for ids in lists()])
    assert dataset.masked
    found = dataset.loss_mask(np.arange(dataset.windows))
    assert found[:, :-1].ravel().tolist() == expected[: dataset.windows * T].tolist()
    import_tokens(folder, tmp_path / "out", tokenizer=tokens / "tokenizer")
    assert (tmp_path / "out/train/shard-00000.mask").read_bytes() == (folder / "00000_tokens.ds.loss").read_bytes()


def test_it_is_mixed_with_others_in_their_order_and_is_evaluated(tokens: Path, tmp_path: Path) -> None:
    folder = write_ds(tmp_path / "ds", [lists()])
    source = {"path": str(folder), "tokenizer": str(tokens / "tokenizer"), "heldout": str(folder / "00000_tokens.ds")}
    section = parse(DataSection, {"sources": [source, {"path": str(tokens)}], "sequence_length": T})
    mixture = open_mixture(section, seed=5)
    rows, location = mixture.read(np.arange(50)), mixture.order.locate(np.arange(50))
    for row, number, window in zip(rows, location.source, location.window, strict=True):
        assert np.array_equal(row, mixture.sources[number].read([window])[0])
    held = open_heldout(section, mixture)
    assert held[0].tokens == sum(map(len, lists()))
    assert held[0].bytes > 0


def remove_last(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:-size])


def test_damaged_folders_are_refused(tokens: Path, tmp_path: Path) -> None:
    def refused(match: str, damage: str, size: int = 2, **source: object) -> None:
        folder = write_ds(tmp_path / "ds", [lists()[:30], lists()[30:]])
        if damage:
            remove_last(folder / damage, size)
        with pytest.raises(HeadraceError, match=match):
            opened(folder, tokens, **source)
        shutil.rmtree(folder)

    refused(r"00001_tokens\.ds has \d+ bytes, and its index ends at \d+ tokens", "00001_tokens.ds")
    refused(r"00000_tokens\.ds\.index has \d+ bytes, no whole number of uint64", "00000_tokens.ds.index")
    refused(r"00000_tokens\.ds has \d+ bytes, and its index ends at", "00000_tokens.ds.index", 8)
    refused(r"data\.sources\.0\.tokenizer\n.*was made with gpt2, and has no copy of it", "", tokenizer=None)
    refused(r"data\.sources\.0\.source", "", source="web")
    folder = write_ds(tmp_path / "ds", [lists()[:30]])
    write_ds(folder / "b", [[[5, 6]]], width=4)
    for path in (folder / "b").iterdir():
        path.rename(folder / f"b{path.name}")
    with pytest.raises(DataError, match=r"ids of 16 bits in 00000_tokens\.ds and 32 bits in b00000_tokens\.ds"):
        opened(folder, tokens)
    (folder / "b00000_tokens.ds.index").unlink()
    with pytest.raises(DataError, match=r"b00000_tokens\.ds\.index is missing: the \.ds file is not finished"):
        opened(folder, tokens)
    big = write_ds(tmp_path / "big", [[[5, 6, 512]]])
    with pytest.raises(ConfigError, match=r"00000_tokens\.ds holds the id 512, and the tokenizer has 512 ids"):
        opened(big, tokens)
    one = write_ds(tmp_path / "one", [lists()[:3], lists()[3:]], loss=[1])
    (one / "00001_tokens.ds.loss").unlink()
    with pytest.raises(DataError, match=r"00001_tokens\.ds\.loss is missing, and other files have one"):
        opened(one, tokens)


def test_metadata_that_contradicts_its_files_or_the_tokenizer_is_refused(tokens: Path, tmp_path: Path) -> None:
    folder = write_ds(tmp_path / "ds", [lists()])
    metadata = folder / "00000_tokens.ds.metadata"
    metadata.write_text("gpt2|4\n1\n1T")
    with pytest.raises(DataError, match=r"metadata says 4 bytes per id, and the tokens and their index say 2"):
        opened(folder, tokens)
    other = shutil.copytree(tokens / "tokenizer", tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 512, "content": "<|more|>"})
    (other / "tokenizer.json").write_text(json.dumps(content))
    metadata.write_text(f"{other}/tokenizer.json|2\n1\n1T")
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.tokenizer.*\n.*which is another tokenizer"):
        opened(folder, tokens)


def test_the_fingerprint_covers_sizes_and_indexes(tokens: Path, tmp_path: Path) -> None:
    def fingerprint(name: str, parts: list[list[list[int]]]) -> str:
        return opened(write_ds(tmp_path / name, parts), tokens).sources[0].manifest.fingerprint

    first = fingerprint("a", [lists()])
    assert fingerprint("b", [lists()]) == first
    swapped = [lists()[1], lists()[0], *lists()[2:]]
    assert fingerprint("c", [swapped]) != first
    assert fingerprint("d", [lists()[:5], lists()[5:]]) != first


def own(work: Path, tokens: Path) -> Path:
    """The documents as a tokens directory that no reader of another format has seen."""
    staging = fresh_staging(work / "by_hand")
    (staging / "train").mkdir()
    with TokenFileWriter(staging / "train/shard-00000", dtype=np.uint16) as writer:
        for ids in documents():
            writer.append(ids)
    shutil.copytree(tokens / "tokenizer", staging / "tokenizer")
    counts = {"documents": len(documents()), "tokens": writer.tokens, "bytes": 0}
    splits = {"train": {**counts, "shards": [{"name": "shard-00000", **counts}]}}
    details: dict[str, Any] = {"tokenizer": describe(tokens / "tokenizer", kind="given"), "splits": splits}
    commit(staging, work / "by_hand", kind="tokens", config={}, details=details)
    return work / "by_hand"


def test_a_run_has_the_losses_of_the_same_tokens_in_a_tokens_directory_and_resumes(
    tokens: Path, tmp_path: Path
) -> None:
    """One run reads .ds in place beside imported MDS: that every format is imported alike is tested by its bytes."""
    folder = write_ds(tmp_path / "ds", [lists()])
    import_tokens(HERE / "mds", tmp_path / "imported", tokenizer=tokens / "tokenizer")
    expected = own(tmp_path, tokens)
    foreign = [{"path": str(folder), "tokenizer": str(tokens / "tokenizer")}, {"path": str(tmp_path / "imported")}]
    found = {}
    for name, sources in (("own", [{"path": str(expected)}, {"path": str(expected)}]), ("foreign", foreign)):
        data = {"sources": sources, "sequence_length": T, "mask_documents": True}
        run = {"dir": str(tmp_path / name / "run"), "steps": 6, "seed": 7, "checkpoint_every": 3}
        (tmp_path / name).mkdir()
        config = tiny_config(
            tokens, tmp_path / name / "run", data=data, run=run, evaluation={"samples": 0}, engine="torch"
        )
        config["scheduler"]["params"] = {"warmup_num_steps": 2, "decay_num_steps": 2}
        path = write_config(tmp_path / name / "config.json", config)
        launch("train.py", path)
        found[name] = losses(tmp_path / name / "run")
    assert found["foreign"] == found["own"]
    checkpoints = tmp_path / "foreign/run/checkpoints"
    shutil.rmtree(checkpoints / "step-00000006")
    said = launch("train.py", tmp_path / "foreign/config.json")
    assert losses(tmp_path / "foreign/run") == found["own"], said
    write_ds(folder, [lists()[:-1]])
    shutil.rmtree(checkpoints / "step-00000006")
    with pytest.raises(AssertionError, match=r"data\.sources\.0"):
        launch("train.py", tmp_path / "foreign/config.json")
