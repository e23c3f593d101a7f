"""Deduplication of real documents: edited duplicates are dropped, the originals are kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from data_prep.config.dedup import DedupSection, NearSection
from data_prep.dedup import document_tasks, minhash
from data_prep.dedup.components import EXACT_DUPLICATE, KEEP, NEAR_DUPLICATE, ComponentsTask, drops_path
from tests.data_prep.dedup.conftest import Batch

SECTION = DedupSection(near=NearSection())
RUNS = 3


def test_originals_of_duplicates_stay(tmp_path: Path, texts: list[str], tokenize: Callable[[list[str]], Batch]) -> None:
    rng = random.Random(0)
    edited = [" ".join(w for w in text.split(" ") if rng.random() > 0.01) for text in texts]
    everything = [*texts, *edited, *texts[:20]]
    reasons = find_duplicates(tmp_path, everything, tokenize(everything))
    originals, near, exact = np.split(reasons, [len(texts), 2 * len(texts)])
    assert (exact == EXACT_DUPLICATE).all()
    assert ((near == EXACT_DUPLICATE) == [a == b for a, b in zip(texts, edited, strict=True)]).all()
    assert (near != KEEP).mean() > 0.98  # 1 % of words leaves a similarity of 0.9, of which 14 x 8 miss 1 in 2,500
    assert (originals == KEEP).mean() > 0.98  # source files may have most of their text in common


def find_duplicates(work: Path, texts: list[str], batch: Batch) -> np.ndarray:
    """uint8[texts]: the decisions of a job of three runs with the documents in random order."""
    near = SECTION.near
    bands = minhash.band_hashes(batch.ids, batch.offsets, section=near)
    digests = [xxhash.xxh3_128_intdigest(text.encode()) for text in texts]
    hashes = np.array([divmod(digest, 1 << 64) for digest in digests], dtype=np.uint64)
    order = np.random.default_rng(0).permutation(len(texts))
    members = [order[n::RUNS] for n in range(RUNS)]
    runs = [work / f"run{n}" for n in range(RUNS)]
    for run, members_of_run in zip(runs, members, strict=True):
        run.mkdir()
        document_tasks.write_dedup_tables(
            run, rank=members_of_run.astype(np.int64), hashes=hashes[members_of_run], bands=bands[members_of_run]
        )
    plans = document_tasks.table_plans(SECTION, runs=runs, documents=np.array(list(map(len, members))), directory=work)
    tasks = [document_tasks.pairs_tasks(of_kind) for of_kind in plans]
    for task in [*tasks[0], *tasks[1]]:
        task.run(lambda _: None)
    exact, near_at = (tuple(task.directory for task in some) for some in tasks)
    last = ComponentsTask(exact, near_at, tuple(runs), work / "components")
    counts = last.run(lambda _: None)
    reasons = np.empty(len(texts), dtype=np.uint8)
    for n, members_of_run in enumerate(members):
        reasons[members_of_run] = np.load(drops_path(last.directory, n))
    assert counts["exact"] == (reasons == EXACT_DUPLICATE).sum()
    assert counts["near"] == (reasons == NEAR_DUPLICATE).sum()
    return reasons
