"""Deduplication in a job: the first of duplicates is kept, over all files and splits, for any workers and task size."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from data_prep.formats.tokenfile import TokenFile, open_split
from foundation.directory import read_manifest
from tests.data_prep.conftest import cli, tree, write_config

NOTICE = "This line stands at the end of every page of the mill, without any information."


def page(i: int) -> str:
    """A unique text: its words are numbers in letters, since line deduplication ignores digits."""
    return " ".join(word(1000 * i + k) for k in range(60)) + "."


def word(number: int) -> str:
    return "".join("abcdefghij"[int(digit)] for digit in f"{number:05d}")


def corpus(work: Path, write_config: Callable[..., str], **fields: Any) -> str:
    """60 pages, 20 of them repeated in a second file: 10 unchanged and 10 with one word replaced."""
    pages = [f"{page(i)}\n{NOTICE}" for i in range(60)]
    again = [pages[i] for i in range(10)] + [pages[i].replace(word(1000 * i + 30), "other") for i in range(10, 20)]
    for name, texts in (("a", pages), ("b", again)):
        (work / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources = [{"path": "a.jsonl", "name": "a"}, {"path": "b.jsonl", "name": "b"}]
    return write_config(sources=sources, heldout_fraction=0.2, list_dropped="reasons", task_bytes=9000, **fields)


def texts_of(tokens: Path) -> list[str]:
    tokenizer = Tokenizer.from_file(str(tokens / "tokenizer" / "tokenizer.json"))
    files = [TokenFile.open(prefix) for split in ("train", "heldout") for prefix in open_split(tokens, split=split)[0]]
    documents = [np.split(np.asarray(file.tokens), np.cumsum(file.sequence_lengths)[:-1]) for file in files]
    return [tokenizer.decode(ids.tolist()) for of_file in documents for ids in of_file]


def test_the_first_of_duplicates_is_kept_over_all_files_and_splits(work: Path) -> None:
    config = corpus(work, write_config, dedup={"exact": True, "near": {}})
    cli("--config", config, "--workers", "1")
    details = read_manifest(work / "tokens", kind="tokens").details
    assert details["dropped"] == {"dedup: exact copy": 10, "dedup: near copy": 10}
    assert sorted(texts_of(work / "tokens")) == sorted(f"{page(i)}\n{NOTICE}" for i in range(60))
    assert sum(split["documents"] for split in details["splits"].values()) == 60
    rows = [json.loads(line) for line in (work / "tokens" / "dropped.jsonl").read_text().splitlines()]
    assert {(row["source"], row["step"]) for row in rows} == {("b", "dedup")}
    lines = (work / "b.jsonl").read_bytes()
    starts = [0, *(i + 1 for i in range(len(lines) - 1) if lines[i : i + 1] == b"\n")]
    assert sorted(row["at"] for row in rows) == starts
    for number, row in enumerate(sorted(rows, key=lambda row: row["at"])):
        assert row["reason"] == ("exact copy" if number < 10 else "near copy")
    cli("--config", config, "--workers", "2", "--set", "output=again", "--set", "task_bytes=100000")
    shards = {k: v for k, v in tree(work / "tokens").items() if "shard" in k or "dropped" in k}
    assert {k: v for k, v in tree(work / "again").items() if k in shards} == shards


def test_exact_deduplication_alone_keeps_near_duplicates(work: Path) -> None:
    cli("--config", corpus(work, write_config, dedup={"exact": True}))
    details = read_manifest(work / "tokens", kind="tokens").details
    assert details["dropped"] == {"dedup: exact copy": 10}
    assert sum(split["documents"] for split in details["splits"].values()) == 70


def test_a_repeated_line_is_kept_once(work: Path) -> None:
    config = corpus(work, write_config, dedup={"exact": True, "lines": {"copies": 1}})
    cli("--config", config, "--workers", "1")
    details = read_manifest(work / "tokens", kind="tokens").details
    assert details["edited"] == {"lines": 59 + 10}  # the notice, and in the changed pages of b nothing else
    assert details["dropped"] == {"lines: nothing but copies": 10}
    assert details["skipped"] == {}
    rows = [json.loads(line) for line in (work / "tokens" / "dropped.jsonl").read_text().splitlines()]
    assert Counter((row["source"], row["reason"]) for row in rows) == {
        ("a", "copies"): 59,
        ("b", "copies"): 10,
        ("b", "nothing but copies"): 10,
    }
    texts = texts_of(work / "tokens")
    assert sum(NOTICE in text for text in texts) == 1
    assert sorted(text.split("\n")[0] for text in texts if "other" not in text) == sorted(page(i) for i in range(60))
    cli("--config", config, "--workers", "2", "--set", "output=again", "--set", "task_bytes=3000")
    shards = {k: v for k, v in tree(work / "tokens").items() if "shard" in k}
    assert {k: v for k, v in tree(work / "again").items() if "shard" in k} == shards


def test_phases_of_deduplication_can_be_run_in_shares(work: Path) -> None:
    config = corpus(work, write_config, dedup={"exact": True, "near": {}, "lines": {}})
    cli("--config", config, "--set", "output=reference")
    cli("prepare", "--config", config)
    for phase in ("lines", "repeated", "map", "tables", "pairs", "copies", "merge", "reduce"):
        for share in ("1", "0"):
            cli("phase", phase, "--config", config, "--task", share, "--of", "2")
    cli("finish", "--config", config)
    assert tree(work / "tokens") == tree(work / "reference")
    error = cli("phase", "fold", "--config", config, "--set", "output=o", "--task", "0", "--of", "1", code=2).stderr
    assert "no prepared job" in error
