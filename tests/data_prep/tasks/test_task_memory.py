"""The memory of a task does not grow with its number of documents, and the limits do not change the output."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from data_prep.config.corpus import CorpusConfig
from data_prep.dedup import line_tasks
from data_prep.dedup.line_tasks import write_line_hashes
from data_prep.dedup.lines import EXEMPT
from data_prep.sources.listing import resolve
from data_prep.sources.units import units
from data_prep.tasks import sorted_runs
from data_prep.tasks.remove_lines import HashLinesTask
from data_prep.tasks.sorted_runs import DOCUMENT, DocumentMetadata, RunWriter, SortedRun, list_runs
from data_prep.tokenizer.engines import Tokens

BANDS, BATCH, BATCHES = 14, 100, 30
LINES = 200_000


@pytest.mark.integration
@pytest.mark.parametrize("block_lines", [1, 64, 300, 1 << 20])
def test_the_table_of_lines_does_not_depend_on_the_block_size(
    block_lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_tasks, "_BLOCK_LINES", block_lines)
    rng = np.random.default_rng(1)
    few = rng.integers(0, 1 << 64, 40, np.uint64)  # each is repeated many times
    lines = np.where(rng.random(1000) < 0.5, rng.choice(few, 1000), rng.integers(0, 1 << 64, 1000, np.uint64))
    lines[rng.random(1000) < 0.1] = EXEMPT
    compared = np.flatnonzero(lines != EXEMPT)
    order = np.argsort(lines[compared], kind="stable")
    assert write_line_hashes(tmp_path, iter(np.split(lines, range(0, 1000, 37)))) == len(compared)
    hashes, items = np.load(tmp_path / "lines.hashes.npy"), np.load(tmp_path / "lines.items.npy")
    assert (hashes.dtype, items.dtype) == (np.uint64, np.uint32)
    assert (hashes == lines[compared][order][None, None]).all()
    assert (items == compared[order][None]).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines.hashes.npy", "lines.items.npy"]


def test_a_task_without_lines_writes_an_empty_table(tmp_path: Path) -> None:
    assert write_line_hashes(tmp_path, []) == 0
    assert np.load(tmp_path / "lines.hashes.npy").shape == (1, 1, 0)
    assert np.load(tmp_path / "lines.items.npy").shape == (1, 0)


@pytest.mark.integration
@pytest.mark.sweep
def test_memory_for_hashing_lines_does_not_grow_with_documents(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_tasks, "_BLOCK_LINES", 4096)
    (work / "a.jsonl").write_text("".join(f'{{"text": "{i:<200}"}}\n' for i in range(LINES)))
    config = CorpusConfig.model_validate(
        {
            "output": "o",
            "sources": [{"path": "a.jsonl"}],
            "tokenizer": {"train": "bpe"},
            "dedup": {"lines": {"min_bytes": 1}},
        }
    )
    found = list(units([resolve(config.sources[0], at="sources.0")], task_bytes=1 << 30))
    tracemalloc.start()
    done = HashLinesTask(0, found, config, work / "lines").run(lambda _counts: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert done["lines"] == LINES
    # the reader's buffer and its copy, two blocks of texts, one range of hashes: an array for each line would be 24 MB
    assert peak < 12 << 20, peak


def write_runs(directory: Path) -> list[Path]:
    """Writes runs of 3,000 documents of one token, with hashes and band hashes; returns their paths."""
    directory.mkdir()
    writer = RunWriter(directory, np.dtype(np.uint16), after=[0])
    rng = np.random.default_rng(2)
    for batch in range(BATCHES):
        rank, none = np.arange(batch * BATCH, (batch + 1) * BATCH), np.zeros(BATCH, np.int64)
        hashes, bands = (rng.integers(0, 1 << 64, (BATCH, n), np.uint64) for n in (2, BANDS))
        metadata = DocumentMetadata(hashes[:, 0], rank, none + 1, none, none, rank, none, hashes, bands)
        writer.add(Tokens((rank + 1).astype(np.uint32), np.arange(BATCH + 1)), metadata)
    writer.flush()
    return list_runs(directory)


def test_the_size_of_a_run_limits_ids_and_metadata_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_runs(tmp_path / "one")
    monkeypatch.setattr(
        sorted_runs, "RUN_BYTES", 400_000
    )  # 3,000 documents have 6,000 bytes of ids, and far more metadata
    many = write_runs(tmp_path / "many")
    assert len(whole) == 1
    assert len(many) > 4
    bytes_each = DOCUMENT.itemsize + 8 * (2 + BANDS)
    assert all(len(SortedRun.open(run).documents) * bytes_each <= 400_000 for run in many)
    rows = []
    for paths in (whole, many):
        opened = [SortedRun.open(path) for path in paths]
        documents = np.concatenate([run.documents for run in opened])
        ids = np.concatenate([np.fromfile(path / "tokens.bin", np.uint16).reshape(-1, 2)[:, 0] for path in paths])
        order = np.argsort(documents["key"])
        rows.append((documents["rank"][order].tolist(), ids[order].tolist()))
    assert rows[0] == rows[1]
