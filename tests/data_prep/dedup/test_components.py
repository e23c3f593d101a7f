"""Of each connected component all documents but the first are dropped, however the job is split into runs."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.config.dedup import DedupSection, NearSection
from data_prep.dedup import document_tasks, merge_tasks, minhash, table
from data_prep.dedup.components import EXACT_DUPLICATE, KEEP, NEAR_DUPLICATE, ComponentsTask, drops_path
from data_prep.dedup.table import PAIRS
from data_prep.task import Counts, Task
from tests.data_prep.dedup.conftest import Batch, hash_of, hashes_of

BANDS = 3


@dataclass(frozen=True)
class Doc:
    """A document: its rank, its text (as a number) and its hash in each band."""

    rank: int
    text: int
    bands: tuple[int, ...]


def documents_from(values: list[tuple[int, tuple[int, ...]]]) -> list[Doc]:
    """Documents of (text, bands) in order; equal texts get equal bands."""
    bands_of = dict(reversed(values))
    return [Doc(rank, text, bands_of[text]) for rank, (text, _) in enumerate(values)]


CORPORA = st.lists(st.tuples(st.integers(0, 12), st.tuples(*[st.integers(0, 15)] * BANDS)), max_size=30).map(
    documents_from
)


@settings(deadline=None, max_examples=30)
@given(
    corpus=CORPORA,
    seed=st.integers(0, 1000),
    runs=st.integers(1, 7),
    parts=st.integers(1, 5),
    most_runs=st.sampled_from([1, 4, 100]),
)
def test_all_documents_of_a_component_but_the_first_are_dropped_for_any_split_into_runs(
    tmp_path_factory: pytest.TempPathFactory, corpus: list[Doc], seed: int, runs: int, parts: int, most_runs: int
) -> None:
    rng = random.Random(seed)
    shuffled = rng.sample(corpus, len(corpus))
    cut = [shuffled[n::runs] for n in range(runs)]
    assert find_drops(tmp_path_factory.mktemp("job"), cut, parts=parts, most_runs=most_runs) == brute_force(corpus)


def test_exact_and_near_duplicates_are_distinguished(tmp_path: Path) -> None:
    corpus = [
        Doc(0, 1, (1, 2, 3)),
        Doc(1, 2, (1, 9, 9)),
        Doc(2, 2, (1, 9, 9)),
        Doc(3, 1, (1, 2, 3)),
        Doc(4, 5, (6,) * 3),
    ]
    assert find_drops(tmp_path, [corpus]) == {
        0: KEEP,
        1: NEAR_DUPLICATE,
        2: EXACT_DUPLICATE,
        3: EXACT_DUPLICATE,
        4: KEEP,
    }


def test_without_near_deduplication_only_equal_texts_are_dropped(tmp_path: Path) -> None:
    corpus = [Doc(0, 1, (1, 1, 1)), Doc(1, 2, (1, 1, 1)), Doc(2, 1, (1, 1, 1))]
    assert find_drops(tmp_path, [corpus], near=False) == {0: KEEP, 1: KEEP, 2: EXACT_DUPLICATE}


def test_texts_that_share_one_word_of_their_hash_are_not_equal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    hashes = np.array([[1, 5], [1, 6], [1, 5], [2, 5]], dtype=np.uint64)
    document_tasks.write_dedup_tables(run, rank=np.arange(4), hashes=hashes)
    assert run_tasks(tmp_path, [run], [4], DedupSection()).tolist() == [KEEP, KEEP, EXACT_DUPLICATE, KEEP]


def test_a_chain_over_many_runs_is_one_component(tmp_path: Path) -> None:
    """The longest path: document n shares a band with n - 1 and n + 1 only."""
    count = 500
    corpus = [Doc(n, n, (n // 2 + 10_000, (n + 1) // 2 + 20_000, n + 30_000)) for n in range(count)]
    random.Random(0).shuffle(corpus)
    reasons = find_drops(tmp_path, [corpus[n::7] for n in range(7)])
    assert [rank for rank, reason in reasons.items() if reason == KEEP] == [0]


def test_runs_without_documents_are_allowed(tmp_path: Path) -> None:
    corpus = [Doc(0, 1, (1, 1, 1)), Doc(1, 1, (1, 1, 1))]
    assert find_drops(tmp_path, [[], corpus[1:], [], corpus[:1]]) == {0: KEEP, 1: EXACT_DUPLICATE}


def test_ranges_cover_every_hash_once() -> None:
    words = np.array([0, 1, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1], dtype=np.uint64)
    for parts in (1, 2, 3, 4, 7, 1000):
        cuts = [table.HashRange(part, parts).cut(words) for part in range(parts)]
        assert [n for cut in cuts for n in range(len(words))[cut]] == list(range(len(words)))


def test_running_a_finished_task_again_changes_no_file(tmp_path: Path) -> None:
    write_and_run(tmp_path, [[Doc(0, 1, (1, 1, 1)), Doc(1, 1, (1, 1, 1))]])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    section = DedupSection(near=NearSection(bands=BANDS))
    run_tasks(tmp_path, [tmp_path / "run0"], [2], section)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("same", [False, True], ids=["all different", "all the same"])
def test_a_pairs_task_keeps_its_memory_limit(tmp_path: Path, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All documents equal is the worst case: then one range has them all."""
    count, runs = 8_000, 25
    for n in range(runs):
        directory = tmp_path / f"run{n}"
        directory.mkdir()
        bands = hashes_of([0 if same else n * count + i for i in range(count)])[:, None]
        document_tasks.write_dedup_tables(directory, rank=np.arange(n * count, (n + 1) * count), bands=bands)
    monkeypatch.setattr(table, "MEMORY", 2 << 20)
    section = DedupSection(exact=False, near=NearSection(bands=1))
    paths = [tmp_path / f"run{n}" for n in range(runs)]
    _, plans = document_tasks.table_plans(
        section, runs=paths, documents=np.full(runs, count), directory=tmp_path / "pairs"
    )
    tasks = document_tasks.pairs_tasks(plans)
    assert len(tasks) == 8
    tasks[0].run(ignore)  # so that imports are not counted as memory of a task
    tracemalloc.start()
    for task in tasks:
        task.run(ignore)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


@pytest.mark.parametrize("kind", ["all different", "all the same", "most in a few runs"])
def test_merged_tables_are_few_and_tasks_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    counts = [12_000 if n >= 90 else 20 for n in range(100)] if kind == "most in a few runs" else [2_000] * 100
    firsts = np.cumsum([0, *counts]).tolist()
    paths = [tmp_path / f"run{n}" for n in range(len(counts))]
    for path, first, count in zip(paths, firsts[:-1], counts, strict=True):
        path.mkdir()
        bands = hashes_of([7 if kind == "all the same" else first + i for i in range(count)])[:, None]
        document_tasks.write_dedup_tables(path, rank=np.arange(first, first + count), bands=bands)
    monkeypatch.setattr(table, "MEMORY", 1 << 20)
    monkeypatch.setattr(merge_tasks, "MOST_RUNS", 99)
    section = DedupSection(exact=False, near=NearSection(bands=1))
    _, (plan,) = document_tasks.table_plans(
        section, runs=paths, documents=np.array(counts), directory=tmp_path / "dedup"
    )
    tasks: list[Task] = [*plan.tasks(), *document_tasks.pairs_tasks([plan])]
    assert len(plan.tasks()) % 10 == 0  # groups of 10 runs
    tasks[0].run(ignore)  # so that imports are not counted as memory of a task
    tracemalloc.start()
    for task in tasks[1:]:
        task.run(ignore)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    found = [list(plan.tables.slices(row=0, within=within)) for within in plan.ranges()]
    assert {len(slices) for slices in found} == {10}
    kept = {int(number) for slices in found for part in slices for number in part.numbers}
    pairs = np.concatenate(
        [np.fromfile(at / PAIRS, "<i8").reshape(-1, 2) for at in document_tasks.pairs_directories(plan)]
    )
    everything = {(run << 32) + i for run, count in enumerate(counts) for i in range(count)}
    assert kept | set(pairs.ravel().tolist()) == everything
    assert len(pairs) == (len(everything) - 1 if kind == "all the same" else 0)


def find_drops(
    work: Path, runs: list[list[Doc]], *, parts: int = 1, near: bool = True, most_runs: int = 100
) -> dict[int, int]:
    """Runs deduplication; returns the decision for each document, by rank."""
    _, made = write_and_run(work, runs, parts=parts, near=near, most_runs=most_runs)
    reasons = [np.load(drops_path(made, n)) for n in range(len(runs))]
    found = {
        doc.rank: int(r) for run, of_run in zip(runs, reasons, strict=True) for doc, r in zip(run, of_run, strict=True)
    }
    return dict(sorted(found.items()))


def write_and_run(
    work: Path, runs: list[list[Doc]], *, parts: int = 1, near: bool = True, most_runs: int = 100
) -> tuple[list[Path], Path]:
    """Writes runs and runs all tasks; returns the runs' directories and that of the components task.

    With more than `most_runs` runs their tables are merged first.
    """
    paths = [work / f"run{n}" for n in range(len(runs))]
    for path, run in zip(paths, runs, strict=True):
        path.mkdir()
        hashes = np.array([[hash_of(d.text), d.text] for d in run], dtype=np.uint64).reshape(-1, 2)
        bands = np.stack([hashes_of([d.bands[b] for d in run]) for b in range(BANDS)], axis=1)
        document_tasks.write_dedup_tables(
            path, rank=np.array([d.rank for d in run], dtype=np.int64), hashes=hashes, bands=bands
        )
    section = DedupSection(near=NearSection(bands=BANDS) if near else None)
    with pytest.MonkeyPatch.context() as patch:
        count = sum(map(len, runs))
        patch.setattr(table, "MEMORY", max(1, -(-count * 80 // parts)))
        patch.setattr(merge_tasks, "MOST_RUNS", most_runs)
        run_tasks(work, paths, list(map(len, runs)), section)
    return paths, work / "components"


def run_tasks(work: Path, runs: list[Path], count: list[int], section: DedupSection) -> np.ndarray:
    """Runs all tasks, in reverse order; returns the decisions for the first run's documents."""
    plans = document_tasks.table_plans(section, runs=runs, documents=np.array(count), directory=work)
    for task in reversed([task for plan in (*plans[0], *plans[1]) for task in plan.tasks()]):
        task.run(ignore)
    for pairs in reversed(document_tasks.pairs_tasks([*plans[0], *plans[1]])):
        pairs.run(ignore)
    exact_at, near_at = (
        tuple(at for plan in of_kind for at in document_tasks.pairs_directories(plan)) for of_kind in plans
    )
    last = ComponentsTask(exact_at, near_at, tuple(runs), work / "components")
    last.run(ignore)
    return np.load(drops_path(last.directory, 0))


def brute_force(corpus: list[Doc]) -> dict[int, int]:
    """The decisions by definition: labels are propagated until nothing changes."""
    label = {doc.rank: doc.rank for doc in corpus}
    changed = True
    while changed:
        changed = False
        for a in corpus:
            for b in corpus:
                connected = a.text == b.text or any(x == y for x, y in zip(a.bands, b.bands, strict=True))
                if connected and label[a.rank] > label[b.rank]:
                    label[a.rank], changed = label[b.rank], True
    first_of = {doc.text: doc.rank for doc in reversed(corpus)}
    near = {doc.rank: KEEP if label[doc.rank] == doc.rank else NEAR_DUPLICATE for doc in corpus}
    return {doc.rank: near[doc.rank] if first_of[doc.text] == doc.rank else EXACT_DUPLICATE for doc in corpus}


def ignore(_counts: Counts) -> None:
    """No progress display."""


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
