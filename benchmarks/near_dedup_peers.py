"""Near-duplicate detection of datatrove, datasketch and rensa, for `near_dedup.py`, run by their own interpreter.

    PYTHON benchmarks/near_dedup_peers.py NAME DIRECTORY

`DIRECTORY/shards/*.jsonl` holds the documents. Writes `DIRECTORY/NAME.npz`: `labels`, int64[documents], equal for
documents that are connected; `dropped`, bool[documents]; `seconds`, CPU time by stage. Imports nothing of this project.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BANDS, ROWS, NGRAM = 14, 8, 5
Found = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], dict[str, float]]


def main() -> None:
    """Runs one implementation."""
    name, directory = sys.argv[1], Path(sys.argv[2])
    labels, dropped, seconds = PEERS[name](directory)
    np.savez(directory / f"{name}.npz", labels=labels, dropped=dropped, **seconds)


def datatrove(directory: Path) -> Found:
    """The four MinHash stages of datatrove's example, one task per shard, one worker, its English word tokenizer."""
    return _datatrove(directory, "eng", work=directory / "datatrove")


def datatrove_whitespace(directory: Path) -> Found:
    """The same with words split at white space, which is faster and not its default."""
    from datatrove.utils.word_tokenizers import WordTokenizer  # type: ignore[import-not-found]  # noqa: PLC0415

    class Whitespace(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            return [text]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [(0, len(text))]

    return _datatrove(directory, Whitespace(), work=directory / "datatrove_whitespace")


def datasketch(directory: Path) -> Found:
    """MinHash of word n-grams, 112 permutations; the bands are grouped as in this project."""
    from datasketch import MinHash  # type: ignore[import-not-found]  # noqa: PLC0415

    def compute_signatures(texts: list[str]) -> np.ndarray[Any, Any]:
        grams = [[" ".join(gram).encode() for gram in _grams(text)] for text in texts]
        return np.stack([m.digest() for m in MinHash.generator(grams, num_perm=BANDS * ROWS)]).astype(np.uint32)

    return _by_minima(directory, compute_signatures)


def rensa(directory: Path) -> Found:
    """RMinHash of word n-grams, including their hashing."""
    from rensa import RMinHash  # type: ignore[import-not-found]  # noqa: PLC0415

    def compute_signatures(texts: list[str]) -> np.ndarray[Any, Any]:
        grams = [[" ".join(gram) for gram in _grams(text)] for text in texts]
        return np.array(RMinHash.digest_matrix_from_token_sets(grams, BANDS * ROWS, 42).to_rows(), dtype=np.uint32)

    return _by_minima(directory, compute_signatures)


def rensa_tokens(directory: Path) -> Found:
    """RMinHash of precomputed hashes of token n-grams (`windows.npz`): only its flat digest is timed."""
    from rensa import RMinHash  # type: ignore[import-not-found]  # noqa: PLC0415

    made = np.load(directory / "windows.npz")
    hashes, offsets = made["hashes"], made["offsets"].astype(np.uint64)
    started = time.process_time()
    rows = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, BANDS * ROWS, 42).to_rows()
    minima = np.array(rows, dtype=np.uint32)
    took = time.process_time() - started
    return *_connect(minima), {"signatures": took}


PEERS: dict[str, Callable[[Path], Found]] = {
    peer.__name__: peer for peer in (datatrove, datatrove_whitespace, datasketch, rensa, rensa_tokens)
}


def _datatrove(directory: Path, words: Any, *, work: Path) -> Found:
    from datatrove.executor import LocalPipelineExecutor  # type: ignore[import-not-found]  # noqa: PLC0415
    from datatrove.pipeline.dedup import (  # type: ignore[import-not-found]  # noqa: PLC0415
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig  # type: ignore[import-not-found]  # noqa: PLC0415
    from datatrove.pipeline.readers import JsonlReader  # type: ignore[import-not-found]  # noqa: PLC0415

    config = MinhashConfig(n_grams=NGRAM, num_buckets=BANDS, hashes_per_bucket=ROWS)
    shards = sorted((directory / "shards").glob("*.jsonl"))
    reader = JsonlReader(str(directory / "shards"), glob_pattern="*.jsonl")
    folders = [str(work / part) for part in ("signatures", "buckets", "remove")]
    stages: dict[str, tuple[list[Any], int]] = {
        "signatures": ([reader, MinhashDedupSignature(folders[0], config=config, language=words)], len(shards)),
        "buckets": ([MinhashDedupBuckets(folders[0], folders[1], config=config)], BANDS),
        "cluster": ([MinhashDedupCluster(folders[1], folders[2], config=config, save_cluster_id=True)], 1),
        "filter": ([reader, MinhashDedupFilter(folders[2])], len(shards)),
    }
    seconds = {}
    for stage, (pipeline, tasks) in stages.items():
        started = time.process_time()
        executor = LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=str(work / "logs" / stage))
        executor.run()
        seconds[stage] = time.process_time() - started
    return *_read_clusters(work / "remove", [len(_texts(shard)) for shard in shards]), seconds


def _read_clusters(folder: Path, counts: list[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """labels and dropped, from the files of datatrove's third stage."""
    starts = np.cumsum([0, *counts])
    labels, dropped = -1 - np.arange(starts[-1]), np.zeros(starts[-1], dtype=bool)
    for path in folder.iterdir():
        raw, start = path.read_bytes(), starts[int(path.stem)]
        if path.suffix == ".clusters":
            for document, cluster in struct.iter_unpack("<2I", raw):
                labels[start + document] = cluster
        elif path.suffix == ".remove":
            dropped[start + np.frombuffer(raw, dtype="<u4")] = True
    return labels, dropped


def _by_minima(directory: Path, compute: Callable[[list[str]], np.ndarray[Any, Any]]) -> Found:
    texts = [text for shard in sorted((directory / "shards").glob("*.jsonl")) for text in _texts(shard)]
    started = time.process_time()
    minima = np.concatenate([compute(texts[i : i + 256]) for i in range(0, len(texts), 256)])
    took = time.process_time() - started
    return *_connect(minima), {"signatures": took}


def _connect(minima: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """labels and dropped for documents with equal bands; the smallest number of a component is kept."""
    labels = np.arange(len(minima))
    groups = [_first_of_group(minima[:, ROWS * b : ROWS * (b + 1)]) for b in range(BANDS)]
    while True:
        before = labels.copy()
        for first in groups:
            smallest = np.full(len(labels), len(labels))
            np.minimum.at(smallest, first, labels)
            labels = smallest[first]
        if np.array_equal(before, labels):
            return labels, labels != np.arange(len(labels))


def _first_of_group(band: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.unique(band, axis=0, return_inverse=True)[1].reshape(-1)


def _texts(shard: Path) -> list[str]:
    with shard.open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def _grams(text: str) -> Iterator[tuple[str, ...]]:
    words = text.lower().split()
    return zip(*(words[n:] for n in range(NGRAM)), strict=False) if len(words) >= NGRAM else iter([tuple(words)])


if __name__ == "__main__":
    main()
