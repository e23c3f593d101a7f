"""Opening is O(shards): nothing is mapped before it is read or held per sample; one rank alone looks at all shards."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.formats.maskfile import mask_path
from data_prep.formats.tokenfile import TokenFile
from foundation.directory import Manifest, read_manifest
from foundation.errors import ConfigError, DataError
from foundation.section import parse
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.data import DataSection
from pipeline.data.dataset import TokenDataset
from pipeline.data.files import OpenFiles
from pipeline.data.loader import StepLoader
from pipeline.data.mixture import DataMixture, open_heldout, open_mixture
from tests.conftest import ROOT, tiny_config, write_config
from tests.data.sparse import write_sparse
from tests.support import output_of

T = 32
SHARDS = 300


def opened(*sources: dict[str, object], **fields: object) -> DataMixture:
    return open_mixture(parse(DataSection, {"sources": list(sources), "sequence_length": T, **fields}), seed=5)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def held_bytes(directory: Path, files: OpenFiles) -> int:
    """Python's memory that an open dataset keeps."""
    tracemalloc.start()
    dataset = TokenDataset.open(directory, split="train", sequence_length=2048, files=files)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert dataset.windows > SHARDS
    return held


def test_opening_maps_nothing_and_its_memory_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    files = OpenFiles()
    held = [
        held_bytes(write_sparse(tmp_path / str(tokens), shards=SHARDS, tokens=tokens, documents=tokens // 500), files)
        for tokens in (10_000, 100_000_000)  # the second: 30 billion tokens, 15 million samples
    ]
    assert held[1] < 1.1 * held[0]
    assert held[1] < 4000 * SHARDS
    assert len(files) == 0


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as Linux shows them")
def test_shards_that_were_read_keep_no_file_descriptor(tmp_path: Path) -> None:
    directory = write_sparse(tmp_path / "many", shards=SHARDS, tokens=5000, documents=10)
    dataset = TokenDataset.open(directory, split="train", sequence_length=2048)
    before = descriptors()
    assert not dataset.read(np.arange(dataset.windows)).any()
    assert descriptors() == before


def masked(directory: Path, *, tokens: int) -> Manifest:
    """Gives each shard a loss mask of zeros; returns a manifest that lists the masks."""
    manifest, masks = read_manifest(directory, kind="tokens"), {}
    for shard in manifest.details["splits"]["train"]["shards"]:
        path = mask_path(directory / "train" / shard["name"])
        path.write_bytes(bytes(tokens))
        masks[f"train/{path.name}"] = {"bytes": tokens, "sha256": "0" * 64}
    return replace(manifest, files=manifest.files | masks)


FEW_DESCRIPTORS = """
import resource, sys
import numpy as np
from tests.data.test_opening import SHARDS, T, masked
from pathlib import Path
from pipeline.data.dataset import TokenDataset

manifest = masked(Path(sys.argv[1]), tokens=50)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
dataset = TokenDataset.open(sys.argv[1], split="train", sequence_length=T, manifest=manifest)
assert dataset.windows == SHARDS
print(dataset.loss_mask(np.arange(SHARDS)).shape)
dataset.read_ahead_masks(np.arange(SHARDS))
"""
"""A process that may have 64 files open looks at the masks of 300 shards."""


def test_more_masks_are_read_than_file_descriptors_are_allowed(tmp_path: Path) -> None:
    directory = write_sparse(tmp_path / "many", shards=SHARDS, tokens=50, documents=2)
    command = [sys.executable, "-c", FEW_DESCRIPTORS, str(directory)]
    said = output_of(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False))
    assert said == f"({SHARDS}, {T + 1})\n"


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="looks at maps as Linux shows them")
def test_masks_beyond_the_limit_are_closed(tmp_path: Path) -> None:
    directory = write_sparse(tmp_path / "some", shards=9, tokens=50, documents=2)
    manifest, files = masked(directory, tokens=50), OpenFiles(most=2)
    dataset = TokenDataset.open(directory, split="train", sequence_length=T, manifest=manifest, files=files)
    assert not dataset.loss_mask(np.arange(dataset.windows)).any()
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert sum(str(directory) in line and line.endswith(".mask") for line in maps) == 2


def test_files_beyond_the_limit_are_closed_and_opened_again(tokens: Path) -> None:
    plain = TokenDataset.open(tokens, split="train", sequence_length=T)
    files = OpenFiles(most=1)
    one = TokenDataset.open(tokens, split="train", sequence_length=T, files=files)
    windows = np.random.default_rng(0).integers(0, plain.windows, 200)
    assert len(plain.manifest.details["splits"]["train"]["shards"]) > 1
    assert np.array_equal(one.read(windows), plain.read(windows))
    assert len(files) == 1


def test_slices_of_a_closed_file_stay_valid(tokens: Path) -> None:
    file = TokenFile.open(tokens / "train/shard-00000")
    part, expected = file.tokens[10:50], np.fromfile(tokens / "train/shard-00000.bin", np.uint16)[10:50]
    file.close()
    del file
    assert np.array_equal(part, expected)
    with pytest.raises(ValueError, match="read-only"):
        part[0] = 1


def test_a_shard_that_does_not_match_the_manifest_is_refused_when_it_is_read(tokens: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tokens, tmp_path / "copy")
    dataset = TokenDataset.open(copy, split="train", sequence_length=T)
    for suffix in (".bin", ".idx"):
        shutil.copyfile(copy / f"train/shard-00001{suffix}", copy / f"train/shard-00000{suffix}")
    with pytest.raises(DataError, match=r"shard-00000 has \d+ tokens, its manifest lists"):
        dataset.read([0])


def test_readahead_covers_all_sources_and_changes_no_sample(tokens: Path) -> None:
    mixture = opened({"path": str(tokens)}, {"path": str(tokens), "weight": 2.0})
    location = mixture.order.locate(np.arange(64))
    before = mixture.rows(location)
    mixture.read_ahead(location)
    assert np.array_equal(mixture.rows(location), before)


@pytest.mark.parametrize("steps", [(1, 3), (5, 2500)])
def test_locations_computed_ahead_are_those_of_each_step(tokens: Path, steps: tuple[int, int]) -> None:
    loader = StepLoader(opened({"path": str(tokens)}), BatchSizes(4, 2, 2, 1, T), dp_rank=0, steps=steps)
    for number, step in enumerate(loader):
        assert step.step == steps[0] + number
        if number % 331 == 0 or step.step == steps[1]:
            for ahead, alone in zip(step.micro_batches, loader.gather(step.step).micro_batches, strict=True):
                assert ahead.input_ids.equal(alone.input_ids)
                assert ahead.labels.equal(alone.labels)


def megatron(prefix: Path, *, dtype: str = "<i4", documents: int = 40, vocabulary: int = 500) -> list[list[int]]:
    """A dataset as Megatron's tool leaves it, several sequences per document, with modes; returns its documents."""
    random = np.random.default_rng(1)
    found, lengths, starts = [], [], [0]
    for _ in range(documents):
        sizes = random.integers(1, 30, random.integers(1, 4)).tolist()
        found.append(random.integers(1, vocabulary, sum(sizes)).tolist())
        lengths += sizes
        starts.append(len(lengths))
    ids = np.array([i for document in found for i in document], dtype=dtype)
    ids.tofile(f"{prefix}.bin")
    code = {"<i4": 4, "<u2": 8, "<i8": 5}[dtype]
    offsets = (np.cumsum(lengths) - lengths) * ids.itemsize
    body = np.array(lengths, "<i4").tobytes() + offsets.astype("<i8").tobytes() + np.array(starts, "<i8").tobytes()
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(starts))
    Path(f"{prefix}.idx").write_bytes(header + body + bytes(len(lengths)))
    return found


@pytest.mark.parametrize("dtype", ["<i4", "<u2", "<i8"])
def test_a_megatron_dataset_is_read_in_place(tokens: Path, tmp_path: Path, dtype: str) -> None:
    documents = megatron(tmp_path / "web.v1_text_document", dtype=dtype)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    prefix = {"path": str(tmp_path / "web.v1_text_document"), "tokenizer": str(tokens / "tokenizer")}
    mixture = opened(prefix)
    (dataset,) = mixture.sources
    flat = [i for document in documents for i in document]
    rows = dataset.read(np.arange(dataset.windows))
    assert rows[:, :-1].ravel().tolist() == flat[: dataset.windows * T]
    assert (dataset.tokens, dataset.windows) == (len(flat), (len(flat) - 1) // T)
    begins = set(np.cumsum([len(document) for document in documents]).tolist())
    boundaries = dataset.boundaries(np.arange(dataset.windows))
    found = {int(s) * T + int(at) for s, at in zip(boundaries.sample, boundaries.at, strict=True)}
    assert found == {at for at in begins if at <= dataset.windows * T}
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_a_megatron_dataset_and_a_tokens_directory_are_mixed(tokens: Path, tmp_path: Path) -> None:
    megatron(tmp_path / "web")
    data = {"sources": [{"path": str(tmp_path / "web"), "tokenizer": str(tokens / "tokenizer")}, {"path": str(tokens)}]}
    section = parse(DataSection, {**data, "sequence_length": T})
    mixture = open_mixture(section, seed=5)
    rows, location = mixture.read(np.arange(50)), mixture.order.locate(np.arange(50))
    for row, source, window in zip(rows, location.source, location.window, strict=True):
        assert np.array_equal(row, mixture.sources[source].read([window])[0])
    assert [str(held.path) for held in open_heldout(section, mixture)] == [str(tokens)]


@pytest.mark.parametrize("bad", [600, -3])
def test_an_id_outside_of_the_vocabulary_is_refused_with_source_sample_and_position(
    tokens: Path, tmp_path: Path, bad: int
) -> None:
    megatron(tmp_path / "web", documents=6000)  # 180,000 tokens
    ids = np.fromfile(tmp_path / "web.bin", dtype="<i4")
    at = ids.size // 2  # not within 65,536 of an end, where opening looks
    ids[at] = bad
    ids.tofile(tmp_path / "web.bin")
    source = {"path": str(tmp_path / "web"), "tokenizer": str(tokens / "tokenizer")}
    section = parse(DataSection, {"sources": [{"path": str(tokens)}, source], "sequence_length": T})
    mixture, window = open_mixture(section, seed=5), at // T
    where = rf"{tmp_path}/web: token {at % T} of window {window} is the id {bad}, and its tokenizer has 512 ids"
    with pytest.raises(DataError, match=where):
        mixture.sources[1].read(np.arange(mixture.sources[1].windows))
    order = mixture.order.locate(np.arange(2 * mixture.sources[1].windows))
    sample = int(np.flatnonzero((order.source == 1) & (order.window == window))[0])
    loader = StepLoader(mixture, BatchSizes(8, 8, 1, 1, T), dp_rank=0, steps=(1, sample))
    with pytest.raises(DataError, match=rf"sample {sample}: {where}"):
        loader.gather(sample // 8 + 1)


def test_the_fingerprint_of_a_megatron_dataset_covers_its_sizes_and_index(tokens: Path, tmp_path: Path) -> None:
    def fingerprint(prefix: Path) -> str:
        (dataset,) = opened({"path": str(prefix), "tokenizer": str(tokens / "tokenizer")}).sources
        return dataset.manifest.fingerprint

    for name in ("a", "b"):
        megatron(tmp_path / name)
    first = fingerprint(tmp_path / "a")
    assert fingerprint(tmp_path / "b") == first
    megatron(tmp_path / "b", documents=41)
    assert fingerprint(tmp_path / "b") != first


def test_a_megatron_dataset_without_a_tokenizer_in_the_config_is_refused(tokens: Path, tmp_path: Path) -> None:
    megatron(tmp_path / "web")
    prefix, tokenizer = str(tmp_path / "web"), str(tokens / "tokenizer")
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.tokenizer\n.*does not name the tokenizer"):
        opened({"path": prefix})
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.source"):
        opened({"path": prefix, "tokenizer": tokenizer, "source": "web"})
    with pytest.raises(ConfigError, match="has the tokenizer"):
        opened({"path": str(tokens), "tokenizer": tokenizer})
    with pytest.raises(DataError, match="one file of a Megatron-LM dataset"):
        opened({"path": f"{prefix}.bin", "tokenizer": tokenizer})
    data = parse(DataSection, {"sources": [{"path": prefix, "tokenizer": tokenizer}], "sequence_length": T})
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.heldout"):
        open_heldout(data, open_mixture(data, seed=5))
    held = parse(
        DataSection, {**data.model_dump(), "sources": [{**data.sources[0].model_dump(), "heldout": str(tokens)}]}
    )
    assert len(open_heldout(held, open_mixture(held, seed=5))) == 1


def test_a_tokenizer_that_is_too_small_for_the_ids_is_refused(tokens: Path, tmp_path: Path) -> None:
    np.full(1000, 512, dtype="<i4").tofile(tmp_path / "web.bin")  # the tokenizer's ids end at 511
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 1, 2)
    body = np.array([1000], "<i4").tobytes() + np.array([0], "<i8").tobytes() + np.array([0, 1], "<i8").tobytes()
    (tmp_path / "web.idx").write_bytes(header + body)
    with pytest.raises(ConfigError, match="holds the id 512, and the tokenizer has 512 ids"):
        opened({"path": str(tmp_path / "web"), "tokenizer": str(tokens / "tokenizer")})


strace = pytest.mark.skipif(shutil.which("strace") is None, reason="counts system calls with strace")


def asked(command: Sequence[str], directory: Path, log: Path, **env: str) -> int:
    """System calls of a command that name a shard in a directory: open, stat and so on."""
    traced = ["strace", "-f", "-e", "trace=%file", "-o", str(log), *command]
    output_of(subprocess.run(traced, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False))
    return len(re.findall(rf'"{re.escape(str(directory))}/[a-z]+/shard-', log.read_text()))


FIRST_BATCH = """
import sys
import numpy as np
from pipeline.config.sections.data import DataSection, SourceSection
from pipeline.data.mixture import open_mixture
data = DataSection(sources=(SourceSection(path=sys.argv[1]),), sequence_length=32)
mixture = open_mixture(data, seed=5, stat_files=sys.argv[2] == "0")
print(mixture.read(np.arange(8)).shape)
"""


@strace
@pytest.mark.parametrize("rank", [0, 1])
def test_a_first_batch_opens_no_more_shards_than_it_has_samples(tmp_path: Path, rank: int) -> None:
    directory = write_sparse(tmp_path / "many", shards=SHARDS, tokens=5000, documents=10)
    command = [sys.executable, "-c", FIRST_BATCH, str(directory), str(rank)]
    looked_at = 2 * SHARDS if rank == 0 else 0  # .bin and .idx
    assert looked_at < asked(command, directory, tmp_path / "log") <= looked_at + 2 * 8


PREPARE = """
import sys
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from pipeline.run.prepare import prepare
prepare(resolve(load_config(sys.argv[1]), world_size=2))
"""


@strace
@pytest.mark.integration
@pytest.mark.sweep
def test_of_the_ranks_of_a_run_the_first_alone_looks_at_all_shards(tokens: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    shards = len(list(tokens.glob("*/shard-*")))
    assert shards > 2
    command = [sys.executable, "-c", PREPARE, str(path)]
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", "TORCHELASTIC_RUN_ID": "x"}
    first, second = (
        asked(command, tokens, tmp_path / "log", RANK=str(rank), LOCAL_RANK=str(rank), **given) for rank in (0, 1)
    )
    assert first == shards
    assert second == 0


def test_a_shard_that_nobody_looked_at_is_refused_when_it_is_read(tmp_path: Path) -> None:
    directory = write_sparse(tmp_path / "few", shards=3, tokens=5000, documents=10)
    os.truncate(directory / "train/shard-00001.bin", 4000)
    with pytest.raises(DataError, match=r"shard-00001\.bin has 4000 bytes"):
        TokenDataset.open(directory, split="train", sequence_length=32)
    dataset = TokenDataset.open(directory, split="train", sequence_length=32, stat_files=False)
    dataset.read(np.arange(3))
    with pytest.raises(DataError, match="shard-00001"):
        dataset.read([dataset.windows // 2])
