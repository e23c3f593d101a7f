"""Runs datatrove's near-duplicate detection for `near_dedup.py`, in its own interpreter.

    PYTHON benchmarks/near_dedup_peers.py NAME DIRECTORY

`DIRECTORY/shards/*.jsonl` holds the documents. The result is `DIRECTORY/NAME.npz`: `labels`, int64[documents], equal
for connected documents; `dropped`, bool[documents]; `seconds`, CPU time by stage. Imports nothing of this project.
"""

from __future__ import annotations

import struct
import sys
import time
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
    """Runs datatrove's example: four MinHash stages, a task per shard, one worker, its English tokenizer."""
    return _datatrove(directory, "eng", work=directory / "datatrove")


def datatrove_whitespace(directory: Path) -> Found:
    """Runs the same stages with words split at white space, which is faster but not datatrove's default."""
    from datatrove.utils.word_tokenizers import WordTokenizer  # type: ignore[import-not-found]  # noqa: PLC0415

    class Whitespace(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            return [text]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [(0, len(text))]

    return _datatrove(directory, Whitespace(), work=directory / "datatrove_whitespace")


PEERS = {peer.__name__: peer for peer in (datatrove, datatrove_whitespace)}


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
    return *_read_clusters(work / "remove", [len(shard.read_bytes().splitlines()) for shard in shards]), seconds


def _read_clusters(folder: Path, counts: list[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Reads labels and dropped documents from the files of datatrove's third stage."""
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


if __name__ == "__main__":
    main()
