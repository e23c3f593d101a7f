"""Cleaning in a job: dropped documents are counted and listed, and word lists are part of the job's identity."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from foundation.directory import read_manifest
from tests.data_prep.conftest import cli, tree, write_config

STEPS = [
    {"step": "word_blocklist", "words": ["forbidden.txt"]},
    {"step": "pii"},
    {"step": "url_blocklist", "domains": ["domains.txt"]},
]


def corpus(work: Path, write_config: Callable[..., str]) -> str:
    rows = [
        {
            "text": f"Text {i} of the mill. Write to miller{i}@example.org. " + "weir " * (i % 2),
            "url": f"http://{i}.org",
        }
        for i in range(80)
    ]
    (work / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "forbidden.txt").write_text("weir\n")
    (work / "domains.txt").write_text("4.org\n6.org\n")
    sources = [{"path": "a.jsonl", "name": "a"}]
    return write_config(sources=sources, clean=STEPS, task_bytes=2000, list_dropped="texts", heldout_fraction=0.2)


def test_dropped_documents_are_counted_and_listed_for_any_number_of_workers(work: Path) -> None:
    config = corpus(work, write_config)
    cli("--config", config, "--workers", "1")
    details = read_manifest(work / "tokens", kind="tokens").details
    rows = [json.loads(line) for line in (work / "tokens" / "dropped.jsonl").read_text().splitlines()]
    assert sum(details["dropped"].values()) == len(rows) == 42
    assert {row["step"] for row in rows} == {"word_blocklist", "url_blocklist"}
    lines = (work / "a.jsonl").read_bytes()
    for row in rows:
        record = json.loads(lines[row["at"] :].split(b"\n", 1)[0])
        assert record["text"].startswith(row["text"][:7])
        assert "weir" in record["text"] or record["url"] in ("http://4.org", "http://6.org")
    assert details["edited"] == {"pii": 40}
    assert sum(split["documents"] for split in details["splits"].values()) == 38
    assert "word_blocklist" in cli("stats", "tokens").stdout
    cli("--config", config, "--workers", "2", "--set", "output=again")
    assert tree(work / "again") == tree(work / "tokens")


def test_a_word_list_that_changes_makes_a_different_job(work: Path) -> None:
    config = corpus(work, write_config)
    cli("prepare", "--config", config)
    (work / "forbidden.txt").write_text("weir\nmill\n")
    assert "cleaning" in cli("--config", config, code=2).stderr
    (work / "forbidden.txt").write_text("weir\n")
    cli("--config", config)
    assert "exists already" in cli("--config", config).stdout
    (work / "forbidden.txt").write_text("weir\nmill\n")
    assert "made differently: cleaning" in cli("--config", config, code=2).stderr
    (work / "forbidden.txt").unlink()
    assert "forbidden.txt" in cli("--config", config, code=2).stderr


def test_the_error_for_a_split_that_cleaning_empties_names_the_steps(work: Path) -> None:
    config = corpus(work, write_config)
    (work / "forbidden.txt").write_text("mill\n")
    error = cli("--config", config, code=2).stderr
    assert "80 word_blocklist" in error


def test_a_url_is_that_of_its_own_text_where_other_sources_of_the_task_have_none(work: Path) -> None:
    """Texts of several sources share a batch; those without further fields stand before and after those with them."""
    for name in ("before", "after"):
        (work / name).mkdir()
        for i in range(4):
            (work / name / f"{i}.txt").write_text(f"A text file {name} the others, number {i}.\n")
    urls = ["http://1.org", "http://4.org", "http://2.org"]
    rows = [{"text": f"A record from {url} about mills.", "url": url, "name": url} for url in urls]
    (work / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "domains.txt").write_text("4.org\n")
    sources = [
        {"path": "before", "type": "text"},
        {"path": "a.jsonl", "id_field": "name"},
        {"path": "after", "type": "text"},
    ]
    clean = [{"step": "url_blocklist", "domains": ["domains.txt"]}]
    cli("--config", write_config(sources=sources, clean=clean, list_dropped="texts", heldout_fraction=0.3))
    (dropped,) = [json.loads(line) for line in (work / "tokens" / "dropped.jsonl").read_text().splitlines()]
    assert dropped["text"] == "A record from http://4.org about mills."
