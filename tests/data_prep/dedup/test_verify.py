"""Verified clusters: a document is dropped only if it is similar to a kept one, whatever chain of pairs connects it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.config.corpus import load
from data_prep.config.dedup import DedupSection, NearSection
from data_prep.dedup import document_tasks, minhash, verify
from data_prep.dedup.components import KEEP, NEAR_DUPLICATE, SEEN, ComponentsTask, drops_path
from foundation.directory import read_manifest
from foundation.errors import ConfigError
from tests.data_prep.conftest import cli, tree, write_config
from tests.data_prep.dedup.conftest import batch_of
from tests.data_prep.in_process import run_job
from tests.data_prep.test_dedup_job import texts_of

SECTION = NearSection()
WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "bdfgklmnprst"]


def drops_of(work: Path, documents: list[list[int]], *, runs: int, section: NearSection, seen: int = 0) -> list[int]:
    """The decision for each document, in a job of so many runs; the last ones are `seen`."""
    minima = minhash.signatures(*vars(batch_of(documents)).values(), section=section)
    order = random.Random(runs).sample(range(len(documents)), len(documents))
    cut = [np.array(order[n::runs]) for n in range(runs)]
    paths = [work / f"{runs}-run{n}" for n in range(runs)]
    for path, which in zip(paths, cut, strict=True):
        path.mkdir(parents=True)
        document_tasks.write_dedup_tables(
            path,
            rank=which - np.where(which >= len(documents) - seen, document_tasks.SEEN_RANKS, 0),
            bands=minhash.bands_of(minima[which], section=section),
            signatures=verify.shortened(minima[which]),
        )
    counts = np.array(list(map(len, cut)))
    dedup = DedupSection(exact=False, near=section)
    _, plans = document_tasks.table_plans(dedup, runs=paths, documents=counts, directory=work / f"{runs}")
    for task in document_tasks.pairs_tasks(plans):
        task.run(lambda _: None)
    near = tuple(at for plan in plans for at in document_tasks.pairs_directories(plan))
    last = ComponentsTask((), near, paths, work / f"{runs}-components", section)
    last.run(lambda _: None)
    assert not (last.directory / document_tasks.SIGNATURES).exists()
    found = np.concatenate([np.load(drops_path(last.directory, n)) for n in range(runs)])
    return found[np.argsort(np.concatenate(cut))].tolist()  # type: ignore[no-any-return]


def chain(links: int, *, shift: int = 10) -> list[list[int]]:
    """Each has 200 tokens, of which it shares all but `shift` with the next one."""
    return [list(range(shift * i, shift * i + 200)) for i in range(links)]


def jaccard(a: list[int], b: list[int]) -> float:
    first, second = ({tuple(each[i : i + 5]) for i in range(len(each) - 4)} for each in (a, b))
    return len(first & second) / len(first | second)


def test_a_chain_keeps_what_shares_nothing(tmp_path: Path) -> None:
    """Connected components lose 299 of 300 documents."""
    documents = chain(300)
    connected = drops_of(tmp_path, documents, runs=3, section=NearSection(clusters="connected"))
    found = {runs: drops_of(tmp_path, documents, runs=runs, section=SECTION) for runs in (1, 4)}
    assert (connected.count(KEEP), found[1]) == (1, found[4])
    kept = [i for i, reason in enumerate(found[1]) if reason == KEEP]
    assert len(kept) > 50
    for i in range(300):  # with the error of an estimate from 112 slots
        assert i in kept or max(jaccard(documents[i], documents[k]) for k in kept if k < i) > SECTION.threshold - 0.2


def test_texts_of_one_template_stay_at_a_similarity_above_it(tmp_path: Path) -> None:
    """marin-community/marin#6851, with more kept documents than all others are compared with. Every tenth is a copy of
    the one before but for a word."""
    rng = random.Random(0)
    documents: list[list[int]] = []
    template = list(range(160))
    for i in range(300):
        own = [rng.randrange(1000, 1 << 30) for _ in range(40)]
        documents.append([*documents[-1][:199], 5] if i % 10 == 9 else template[:80] + own + template[80:])
    assert (jaccard(documents[0], documents[1]) < 0.7, jaccard(documents[8], documents[9]) > 0.95) == (True, True)
    section = NearSection(similarity=0.85)
    found = drops_of(tmp_path, documents, runs=1, section=section)
    assert [i for i, reason in enumerate(found) if reason != KEEP] == list(range(9, 300, 10))
    assert drops_of(tmp_path, documents, runs=5, section=section) == found


def test_documents_beyond_the_first_kept_ones_are_decided_as_if_all_were_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    centres = rng.integers(0, 256, (30, SECTION.slots), np.uint8)
    documents = centres[rng.integers(0, 30, 400)]
    documents[np.arange(400), rng.integers(0, SECTION.slots, 400)] += 1
    cluster = np.repeat([0, 1], 200)
    how: dict[str, Any] = {"seen": np.zeros(400, dtype=bool), "section": SECTION}
    expected = verify.find_kept(cluster, documents, **how)
    monkeypatch.setattr(verify, "_FIRST_KEPT", 3)
    np.testing.assert_array_equal(verify.find_kept(cluster, documents, **how), expected)
    assert len(set(expected.tolist())) == 60


@pytest.mark.parametrize("first_kept", [64, 1])
def test_what_is_seen_counts_as_kept_also_where_it_is_similar_to_what_is_seen(
    first_kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are seen, and the new one is a copy of the second alone."""
    monkeypatch.setattr(verify, "_FIRST_KEPT", first_kept)
    *seen, new = chain(3, shift=28)
    for runs in (1, 3):
        assert drops_of(tmp_path, [new, *seen], runs=runs, section=SECTION, seen=2) == [NEAR_DUPLICATE, SEEN, SEEN]
    assert drops_of(tmp_path / "none", [*seen, new], runs=1, section=SECTION) == [KEEP, NEAR_DUPLICATE, KEEP]


def test_the_estimate_from_8_bits_of_each_minimum_is_that_of_the_whole() -> None:
    rng = random.Random(1)
    pairs = [
        (list(range(400)), list(range(cut)) + [rng.randrange(1 << 30) for _ in range(400 - cut)])
        for cut in range(0, 400, 4)
    ]
    minima = minhash.signatures(*vars(batch_of([d for pair in pairs for d in pair])).values(), section=SECTION)
    whole = (minima[::2] == minima[1::2]).mean(axis=1)
    short = (verify.shortened(minima[::2]) == verify.shortened(minima[1::2])).mean(axis=1)
    assert abs((short - 1 / 256) / (1 - 1 / 256) - whole).max() < 0.04
    assert abs(whole - [jaccard(*pair) for pair in pairs]).max() < 0.16  # 3.4 standard deviations


def text(i: int, *, words: int = 80) -> str:
    return " ".join(random.Random(i).choices(WORDS, k=words))


def lines(name: str, texts: list[str]) -> None:
    Path(name).write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))


def kept_texts(tokens: Path) -> list[str]:
    return sorted(texts_of(tokens))


@pytest.mark.parametrize("dedup", [{"exact": True}, {"exact": False, "near": {}}, {"near": {"clusters": "connected"}}])
def test_what_is_seen_is_not_written_and_its_duplicates_are_dropped(dedup: dict[str, Any], work: Path) -> None:
    """datatrove#370; also where the seen source is the last one."""
    old, new = [text(i) for i in range(40)], [text(i) for i in range(100, 140)]
    lines("new.jsonl", [*new, *old[:7], new[3]])
    lines("old.jsonl", [*old, old[1]])
    sources: list[dict[str, Any]] = [{"path": f"{name}.jsonl", "name": name} for name in ("new", "old")]
    sources[1]["seen"] = True
    run_job(write_config(sources=sources, dedup=dedup, list_dropped="reasons", task_bytes=3000))
    assert kept_texts(work / "tokens") == sorted(new)
    details = read_manifest(work / "tokens", kind="tokens").details
    kind = "exact copy" if dedup.get("exact", True) else "near copy"
    assert details["dropped"] == {f"dedup: {kind}": 8, "dedup: seen": 41}
    assert details["clusters"]["sources"] == {"new": {kind: 8}}
    assert len((work / "tokens" / "dropped.jsonl").read_text().splitlines()) == 8


def test_what_is_seen_comes_before_all_others_also_where_repeated_lines_are_removed(work: Path) -> None:
    old, new = [text(i) for i in range(20)], [text(i) for i in range(100, 120)]
    lines("new.jsonl", [*(f"{text(i)}\n{text(i + 100)}" for i in range(20)), *old])
    lines("old.jsonl", old)
    sources = [{"path": "new.jsonl", "name": "new"}, {"path": "old.jsonl", "name": "old", "seen": True}]
    run_job(write_config(sources=sources, dedup={"lines": {}}, task_bytes=3000, heldout_fraction=0.3))
    assert kept_texts(work / "tokens") == sorted(new)


@pytest.mark.usefixtures("work")
def test_seen_is_refused_where_it_would_have_no_effect() -> None:
    seen = {"path": "a.jsonl", "seen": True}
    for fields, why in (({"sources": [seen]}, "nothing to write"), ({"sources": [seen, {"path": "b"}]}, "needs dedup")):
        with pytest.raises(ConfigError, match=why):
            load(write_config(**fields))


def test_sizes_of_clusters_and_the_loss_of_each_source_are_in_stats(work: Path) -> None:
    lines("a.jsonl", [text(i) for i in range(40)])
    lines("b.jsonl", [*(text(i) for i in range(5)), *(text(7) + f" {word}" for word in "abc"), text(300), text(300)])
    config = write_config(sources=[{"path": f"{n}.jsonl", "name": n} for n in "ab"], dedup={"near": {}})
    cli("--config", config)
    clusters = read_manifest(work / "tokens", kind="tokens").details["clusters"]
    assert clusters["sources"] == {"b": {"exact copy": 6, "near copy": 3}}
    assert clusters["sizes"] == [0, 6, 1]  # of 2 or 3 documents, and of 4 to 7
    first = sum(len(json.dumps({"text": text(i)})) + 1 for i in range(7))
    assert clusters["largest"][0] == {"documents": 4, "source": "a", "file": "a.jsonl", "at": first}
    said = cli("stats", "tokens").stdout
    assert "b: 9 of 10 documents were duplicates (6 exact copy, 3 near copy)" in said
    assert f"4 documents; kept: a: a.jsonl at {first}" in said
    cli("--config", config, "--workers", "2", "--set", "output=again", "--set", "task_bytes=500")
    assert {k: v for k, v in tree(work / "again").items() if "shard" in k} == {
        k: v for k, v in tree(work / "tokens").items() if "shard" in k
    }


def test_one_copy_of_each_cluster_is_left_after_every_step_that_drops(work: Path) -> None:
    """ChenghaoMou/text-dedup#129: cleaning, decontamination and removal of lines come before, the split after."""
    pages = [text(i, words=120) for i in range(60)]
    copies = [page.replace(page.split()[60], "other") for page in pages]
    short = [text(500 + i, words=9) for i in range(20)]  # dropped by cleaning
    leaked = [pages[3] + "\n" + text(900), text(900)]  # of a benchmark
    lines("bench.jsonl", [text(900)])
    lines("a.jsonl", [*leaked, *short, *pages[:30], *copies[30:]])
    lines("b.jsonl", [*copies[:30], *pages, *short])
    steps = [
        {"step": "decontaminate", "evaluations": ["bench.jsonl"]},
        {"step": "gopher_quality", "min_words": 50, "min_stop_words": None},
    ]
    config = write_config(
        sources=[{"path": "a.jsonl", "name": "a"}, {"path": "b.jsonl", "name": "b"}],
        clean=steps, dedup={"near": {}, "lines": {}}, heldout_fraction=0.3,
    )  # fmt: skip
    run_job(config)
    kept = kept_texts(work / "tokens")
    assert sorted([*pages[:30], *copies[30:]]) == kept
