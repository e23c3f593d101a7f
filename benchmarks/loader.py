"""Benchmark of the data loader: against a bare `np.take` and Megatron's GPTDataset; and opening a trillion tokens.

    python -m benchmarks.loader [--tokens 200000000] [--length 2048] [--batch 64] [--shards 10000] [--peers PYTHON]

Writes random ids as documents of web-like lengths into a tokens directory, packs it, and reads random batches with
every loader, for the same number of samples, in one process, with the data in memory. Figures are samples per second of
CPU time, the best of several alternating rounds. Before that, with the page cache dropped, the wall time of the first
batches with and without readahead; and last, opening `--shards` shards of 100 million tokens (sparse files).

`--peers` is a Python with megatron-core and torch (`loader_peers.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.tokenfile import TokenFileWriter
from data_prep.packing.pack import pack
from headrace.base.directory import commit, fresh_staging
from headrace.base.section import parse
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.data import DataSection
from pipeline.data.loader import StepLoader
from pipeline.data.mixture import DataMixture, open_mixture
from tests.data.sparse import TOKENIZER, write_sparse

ROUNDS, SHARDS = 5, 4
SHARD_TOKENS = 100_000_000


def main() -> None:
    """Runs the benchmark and prints its results."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        tokens = write_tokens(Path(work) / "tokens", tokens=arguments.tokens)
        started = time.process_time()
        packing = pack(tokens, length=arguments.length)
        entry = packing.details["splits"]["train"]
        share = 100 * entry["padding"] / (entry["bins"] * (arguments.length + 1))
        print(f"packed: {entry['pieces']:,} pieces into {entry['bins']:,} samples, {share:.3f} % padding", end=", ")
        print(f"{time.process_time() - started:.1f} s of this process, which only waits", flush=True)
        cold(tokens, arguments)  # first: pages that are mapped are not dropped from the cache
        loaders = make_loaders(tokens, arguments)
        for name, rate in race(loaders, arguments).items():
            print(f"{name:>52}  {rate:>10,.0f} samples/s", flush=True)
        if arguments.peers:
            script = str(Path(__file__).with_name("loader_peers.py"))
            shard, numbers = tokens / "train/shard-00000", (str(arguments.length), str(arguments.batch))
            large = write_large(Path(work) / "large", documents=arguments.documents)
            command = [arguments.peers, script, str(shard), *numbers, str(large)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                print(f"{name:>52}  {value}", flush=True)
        opening(Path(work) / "sparse", arguments)


def write_tokens(directory: Path, *, tokens: int) -> Path:
    """A training split of random ids in documents of log-normal lengths, 700 tokens in the mean."""
    staging, random = fresh_staging(directory), np.random.default_rng(0)
    (staging / "train").mkdir()
    shards: list[dict[str, Any]] = []
    for number in range(SHARDS):
        name, documents = f"shard-{number:05d}", 0
        with TokenFileWriter(staging / "train" / name, dtype=np.uint16) as writer:
            while writer.tokens < tokens // SHARDS:
                lengths = np.maximum(2, random.lognormal(np.log(700) - 0.5, 1.0, 10_000)).astype(np.int64)
                writer.append(random.integers(1, 50_000, lengths.sum(), dtype=np.uint16), lengths)
                documents += lengths.size
        shards.append({"name": name, "documents": documents, "tokens": writer.tokens, "bytes": 4 * writer.tokens})
    sums = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
    details = {"tokenizer": TOKENIZER, "splits": {"train": {**sums, "shards": shards}}}
    commit(staging, directory, kind="tokens", config={}, details=details)
    return directory


def write_large(prefix: Path, *, documents: int) -> Path:
    """A token file of very many documents of 2 to 1,400 tokens: a whole index, and a hole for the tokens."""
    lengths = np.random.default_rng(2).integers(2, 1400, documents).astype("<i4")
    ends = 2 * np.cumsum(lengths, dtype="<i8")
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, documents, documents + 1))
        for part in (lengths, ends - 2 * lengths, np.arange(documents + 1, dtype="<i8")):
            part.tofile(file)
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(int(ends[-1]))
    return prefix


def make_loaders(tokens: Path, arguments: argparse.Namespace) -> dict[str, Callable[[int], object]]:
    """By name: gathers the batch of a number."""
    length, batch = arguments.length, arguments.batch
    plain = open_tokens(tokens, length)
    packed = open_tokens(tokens, length, packing="best_fit")
    cut = BatchSizes(batch, batch, 1, 1, length)
    mapped = np.memmap(tokens / "train/shard-00000.bin", dtype=np.uint16, mode="r")
    windows = (mapped.size - 1) // length
    flat = np.asarray(mapped)[: windows * length].reshape(windows, length)
    random = np.random.default_rng(1)
    wanted = [random.integers(0, windows, batch) for _ in range(4096)]
    everywhere = [random.integers(0, plain.sources[0].windows, batch) for _ in range(4096)]

    def by_row(number: int) -> object:
        rows = np.empty((batch, length + 1), dtype=np.int64)
        for row, window in zip(rows, wanted[number], strict=True):
            row[:] = mapped[window * length : window * length + length + 1]
        return rows

    return {
        "np.take of a batch, uint16 (T, not T + 1)": lambda i: np.take(flat, wanted[i], axis=0),
        "np.take of a batch, as int64": lambda i: np.take(flat, wanted[i], axis=0).astype(np.int64),
        "a slice of the memmap per row, as int64": by_row,
        "dataset.rows, uint16, 4 shards": lambda i: plain.sources[0].rows(everywhere[i]),
        "dataset.read, int64, 4 shards": lambda i: plain.sources[0].read(everywhere[i]),
        "dataset.read, int64, best fit": lambda i: packed.sources[0].read(everywhere[i] % packed.sources[0].windows),
        "loader: order, readahead, two int64 tensors": steps(plain, cut),
        "loader, best fit": steps(packed, cut),
        "loader, contiguous, documents masked": steps(plain, cut, mask_documents=True),
        "loader, best fit, documents masked": steps(packed, cut, mask_documents=True),
    }


def open_tokens(tokens: Path, length: int, *, packing: str = "contiguous") -> DataMixture:
    """The training samples of a tokens directory."""
    return open_mixture(
        parse(DataSection, {"sources": [{"path": str(tokens)}], "sequence_length": length, "packing": packing}), seed=0
    )


def steps(mixture: DataMixture, cut: BatchSizes, *, mask_documents: bool = False) -> Callable[[int], object]:
    """The loader's own work, step by step, in the calling thread."""
    loader = StepLoader(mixture, cut, dp_rank=0, steps=(1, 1 << 30), mask_documents=mask_documents)
    items = loader._items()  # what its thread does
    return lambda _number: next(items)


def race(loaders: dict[str, Callable[[int], object]], arguments: argparse.Namespace) -> dict[str, float]:
    """Samples per second of CPU time, the best of alternating rounds."""
    best = dict.fromkeys(loaders, 0.0)
    for round_number in range(ROUNDS + 1):
        for name, gather in loaders.items():
            started = time.process_time()
            for number in range(arguments.batches):
                gather((round_number * arguments.batches + number) % 4096)
            rate = arguments.batches * arguments.batch / (time.process_time() - started)
            best[name] = max(best[name], rate if round_number else 0.0)  # the first round maps
    return best


def cold(tokens: Path, arguments: argparse.Namespace) -> None:
    """The first batches from disk: with a plain memory map, and with readahead."""
    samples = np.arange(arguments.batch * 8)

    def plain() -> None:
        mapped = [np.memmap(path, dtype=np.uint16, mode="r") for path in sorted((tokens / "train").glob("*.bin"))]
        spans = open_tokens(tokens, arguments.length)
        dataset = spans.sources[0]
        shards, numbers = dataset.locate(spans.order.locate(samples).window)
        for shard, start in zip(shards.tolist(), (numbers * arguments.length).tolist(), strict=True):
            mapped[shard][start : start + arguments.length + 1].astype(np.int64)

    def ours(*, read_ahead: bool) -> None:
        mixture = open_tokens(tokens, arguments.length)
        location = mixture.order.locate(samples)
        if read_ahead:
            mixture.read_ahead(location)
        mixture.rows(location)

    ways: dict[str, Callable[[], object]] = {
        "a plain memory map": plain,
        "random access, no readahead": partial(ours, read_ahead=False),
        "random access, readahead (as the loader)": partial(ours, read_ahead=True),
    }
    for name, way in ways.items():
        drop_cache(tokens)
        before, started = resident_kib(tokens), time.perf_counter()
        way()
        seconds, read = time.perf_counter() - started, resident_kib(tokens) - before
        print(
            f"{'cold: ' + name:>52}  {len(samples):,} samples in {1e3 * seconds:,.1f} ms, {read / 1024:,.0f} MiB read"
        )


def drop_cache(tokens: Path) -> None:
    """Gives up the pages of the shards."""
    for path in (tokens / "train").iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def resident_kib(tokens: Path) -> int:
    """What of the shards is in the page cache."""
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, (tokens / "train").iterdir())]
    return sum(int(line) for line in subprocess.run(command, check=True, capture_output=True).stdout.split()) // 1024


def opening(directory: Path, arguments: argparse.Namespace) -> None:
    """Opens very many shards, and reads a little of them."""
    write_sparse(directory, shards=arguments.shards, tokens=SHARD_TOKENS, documents=SHARD_TOKENS // 700)
    before, started = memory_mb("RssAnon"), time.process_time()
    mixture = open_tokens(directory, arguments.length)
    seconds, held = time.process_time() - started, memory_mb("RssAnon") - before
    (dataset,) = mixture.sources
    print(
        f"{'opening':>52}  {arguments.shards:,} shards, {dataset.tokens:,} tokens, {dataset.windows:,} samples:",
        end=" ",
    )
    print(f"{seconds:.2f} s of CPU, {held:.0f} MB held")
    started = time.process_time()
    for step in range(100):
        mixture.read(np.arange(step * arguments.batch, (step + 1) * arguments.batch))
    maps, handles = len(Path("/proc/self/maps").read_text().splitlines()), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    rate = 100 * arguments.batch / (time.process_time() - started)
    print(f"{'its first 100 batches, shards opened on the way':>52}  {rate:>10,.0f} samples/s", end=", ")
    print(f"{maps:,} maps, {handles} files open, {memory_mb('RssAnon') - before:.0f} MB held")


def memory_mb(field: str) -> float:
    """Of this process, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=400, help="per round")
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--documents", type=int, default=20_000_000, help="of the index that Megatron's is built for")
    parser.add_argument("--peers", metavar="PYTHON", help="a Python with megatron-core")
    parser.add_argument("--work", help="where to write (default: the system's temporary directory)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
