"""Benchmark of the data loader: against a bare `np.take` and Megatron's GPTDataset.

    python -m benchmarks.loader [--tokens 200000000] [--length 2048] [--batch 64] [--peers PYTHON]

It writes random ids as documents of web-like lengths into a tokens directory, packs it, and reads random batches with
every loader: the same number of samples, in one process, with the data in memory. Figures are samples per second of CPU
time, as medians over alternating rounds.

`--peers` is the path of a Python with megatron-core and torch (`loader_peers.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Seconds, alternate, last_json, make_parser, print_head, print_row, spread, work_folder
from data_prep.formats.tokenfile import TokenFileWriter
from data_prep.packing.pack import pack
from foundation.directory import commit, fresh_staging
from foundation.section import parse
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.data import DataSection
from pipeline.data.loader import StepLoader
from pipeline.data.mixture import DataMixture, open_mixture
from tests.data.sparse import TOKENIZER

ROUNDS, SHARDS = 5, 4
Gather = Callable[[int], object]


def main() -> None:
    """Runs the benchmark and prints its results."""
    arguments = _arguments()
    with work_folder(arguments.work) as work:
        tokens = write_tokens(work / "tokens", tokens=arguments.tokens)
        entry = pack(tokens, length=arguments.length).details["splits"]["train"]
        share = 100 * entry["padding"] / (entry["bins"] * (arguments.length + 1))
        print(f"packed: {entry['pieces']:,} pieces into {entry['bins']:,} samples, {share:.3f} % padding\n", flush=True)
        print_head("loader", "samples/s")
        ways = {name: partial(timed, gather, arguments) for name, gather in make_loaders(tokens, arguments).items()}
        for name, rates in alternate(ways, ROUNDS).items():
            print_row(name, spread(rates, 0))
        if arguments.peers:
            script = Path(__file__).with_name("loader_peers.py")
            shard = tokens / "train/shard-00000"
            rates = last_json([arguments.peers, script, shard, arguments.length, arguments.batch])
            print_row("Megatron GPTDataset: tokens and labels, stacked", spread(rates, 0))


def write_tokens(directory: Path, *, tokens: int) -> Path:
    """Writes a training split of random ids in documents of log-normal lengths, 700 tokens on average."""
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


def make_loaders(tokens: Path, arguments: argparse.Namespace) -> dict[str, Gather]:
    """Name of a loader -> function that gathers the batch with a given number."""
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
    """Opens the training samples of a tokens directory."""
    return open_mixture(
        parse(DataSection, {"sources": [{"path": str(tokens)}], "sequence_length": length, "packing": packing}), seed=0
    )


def steps(mixture: DataMixture, cut: BatchSizes, *, mask_documents: bool = False) -> Callable[[int], object]:
    """Makes a function that runs the loader's own work, step by step, in the calling thread."""
    loader = StepLoader(mixture, cut, dp_rank=0, steps=(1, 1 << 30), mask_documents=mask_documents)
    items = loader._items()  # the work of its thread
    return lambda _number: next(items)


def timed(gather: Gather, arguments: argparse.Namespace) -> float:
    """Samples per second of CPU time over one round."""

    def batches() -> None:
        for number in range(arguments.batches):
            gather(number)

    return arguments.batches * arguments.batch / Seconds.of(batches).cpu


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=400, help="per round")
    parser.add_argument("--peers", metavar="PYTHON", help="a Python with megatron-core")
    parser.add_argument("--work", help="where to write (default: the system's temporary directory)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
