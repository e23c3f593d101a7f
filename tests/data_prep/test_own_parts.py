"""Cleaning by source, readers and filters of one's own, and the examples of `examples/plugin`."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_prep.config.corpus import CorpusConfig
from data_prep.job.stats import read_stats
from foundation.section import parse
from pipeline.runtime.metrics.journal import read_rows
from tests import warm
from tests.conftest import launch, tiny_config, write_config
from tests.support import output_of
from tests.warm import ROOT

PROSE = "The river that runs to the mill has been of use to the people of the town, and they have kept it clean. " * 4
CODE = "def f(x):\n    return {'a': x + 1}\n\n" * 8
GOPHER = [{"step": "gopher_quality"}]


def prep(work: Path, config: dict[str, Any]) -> str:
    (work / "c.json").write_text(json.dumps(config))
    return output_of(warm.run("-m", "data_prep", "--config", "c.json", cwd=work, imported="data_prep"))


def corpus(work: Path, **fields: Any) -> dict[str, Any]:
    for name, text in {"web": PROSE, "code": CODE}.items():
        lines = (json.dumps({"text": f"{text}\n{name} number {i}"}) for i in range(60))
        (work / f"{name}.jsonl").write_text("\n".join(lines))
    sources = [{"name": name, "path": f"{name}.jsonl"} for name in ("web", "code")]
    tokenizer = {"train": "bpe", "vocab_size": 400}
    return {"output": "tokens", "sources": sources, "tokenizer": tokenizer, "heldout_fraction": 0.1, **fields}


def documents(work: Path) -> dict[str, int]:
    rows, _, _ = read_stats(str(work / "tokens"))
    return {name: sum(row.documents for row in rows if row.source == name) for name in ("web", "code")}


def test_a_source_has_its_own_cleaning_and_stats_name_drops_by_source_and_filter(tmp_path: Path) -> None:
    config = corpus(tmp_path, clean=GOPHER)
    prep(tmp_path, config)
    assert documents(tmp_path) == {"web": 60, "code": 0}
    _, _, lines = read_stats(str(tmp_path / "tokens"))
    at = lines.index("code: cleaning dropped 60 of 60 documents (100.0%)")
    assert lines[at + 1].split()[0] == "60"
    assert "gopher_quality: " in lines[at + 1]
    assert [line.strip().startswith("code.jsonl at ") for line in lines[at + 2 : at + 5]] == [True] * 3
    assert "def f(x): return {'a': x + 1}" in lines[at + 2]
    shutil.rmtree(tmp_path / "tokens")
    config["sources"][1]["clean"] = []
    prep(tmp_path, config)
    assert documents(tmp_path) == {"web": 60, "code": 60}


def test_cleaning_of_a_source_does_not_change_the_identity_of_configs_without_it(tmp_path: Path) -> None:
    config = corpus(tmp_path, clean=GOPHER)
    without = parse(CorpusConfig, config).identity()
    assert {"clean", "reader"}.isdisjoint(without["sources"][0])
    config["sources"][0]["clean"] = []
    assert parse(CorpusConfig, config).identity() != without


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"clean": [{"step": "gopher"}]}, "sources.0.clean.0.step"),
        ({"clean": [{"step": "function", "function": "no_such_module:f"}]}, "no_such_module cannot be imported"),
        ({"reader": "a:b"}, 'needs "type": "function"'),
        ({"type": "function"}, "one of that type a reader"),
        ({"messages_field": "messages"}, "holds conversations"),
    ],
)
def test_wrong_parts_of_a_source_are_refused(tmp_path: Path, source: dict[str, Any], words: str) -> None:
    config = corpus(tmp_path, clean=GOPHER)
    config["sources"][0] |= source
    (tmp_path / "c.json").write_text(json.dumps(config))
    done = warm.run("-m", "data_prep", "--config", "c.json", cwd=tmp_path, imported="data_prep")
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert not (tmp_path / "tokens").exists()


def test_conversations_stand_beside_cleaned_text_with_an_empty_chain(tmp_path: Path) -> None:
    config = corpus(tmp_path, clean=GOPHER)
    config["sources"][0] |= {"messages_field": "messages", "clean": []}
    assert parse(CorpusConfig, config).steps_of(parse(CorpusConfig, config).sources[0]) == []


MAIL = "From a@b Thu Jan  1 00:00:00 2026\nSubject: {subject}\n\n{text}\n> quoted {i}\n\n"


@pytest.mark.integration
def test_the_plugin_reads_filters_and_calls_back(tmp_path: Path) -> None:
    for file in (ROOT / "examples/plugin").glob("*.py"):
        shutil.copy(file, tmp_path)
    subjects = ["Out of Office" if i % 4 == 0 else f"mill {i}" for i in range(80)]
    mails = (MAIL.format(subject=subject, text=f"{PROSE}{i}", i=i) for i, subject in enumerate(subjects))
    (tmp_path / "a.mbox").write_text("".join(mails))
    source = {"name": "mails", "path": "*.mbox", "type": "function", "reader": "mailbox_reader:read"}
    step = {"step": "function", "function": "reply_filter:own_words", "fields": ["subject"]}
    prep(tmp_path, corpus(tmp_path, sources=[source], clean=[step]))
    rows, dropped, lines = read_stats(str(tmp_path / "tokens"))
    assert sum(row.documents for row in rows) == 60
    assert dropped == {"reply_filter:own_words: filtered": 20}
    assert any("a.mbox at 0" in line for line in lines)
    manifest = json.loads((tmp_path / "tokens/manifest.json").read_text())
    assert manifest["details"]["edited"] == {"reply_filter:own_words": 60}
    assert {Path(file).name for file in manifest["details"]["cleaning"]["files"]} == {
        "mailbox_reader.py",
        "reply_filter.py",
    }
    config = tiny_config(tmp_path / "tokens", tmp_path / "run", engine="torch", callbacks=["target_loss:make"])
    config |= {"zero_optimization": {"stage": 0}, "evaluation": {"samples": 2}}
    said = launch("train.py", write_config(tmp_path / "t.json", config))
    assert "the loss is below 5.0" in said
    (event,) = [row for row in read_rows(tmp_path / "run") if row.get("event") == "target_loss"]
    assert event["loss"] < 5


def test_a_filter_or_reader_that_fails_names_itself(tmp_path: Path) -> None:
    (tmp_path / "broken_parts.py").write_text(
        "def fail(text, fields):\n    raise KeyError('url')\ndef number(text, fields):\n    return 7\n"
        "def read(path):\n    yield {'text': 'a'}\n    yield 7\n"
    )
    for name, words in {"fail": "failed with KeyError", "number": "returned int"}.items():
        config = corpus(tmp_path, clean=[{"step": "function", "function": f"broken_parts:{name}"}])
        (tmp_path / "c.json").write_text(json.dumps(config))
        done = warm.run("-m", "data_prep", "--config", "c.json", cwd=tmp_path, imported="data_prep")
        assert done.returncode == 2, done.stderr
        assert f"broken_parts:{name} {words}" in done.stderr
    source = {"path": "web.jsonl", "type": "function", "reader": "broken_parts:read"}
    (tmp_path / "c.json").write_text(json.dumps(corpus(tmp_path, sources=[source])))
    done = warm.run("-m", "data_prep", "--config", "c.json", cwd=tmp_path, imported="data_prep")
    assert "the reader yielded int, not a dict" in done.stderr


def mixed(work: Path, shares: dict[str, int]) -> list[dict[str, Any]]:
    """Sources of two kinds of text, in files of several kinds: name -> number of documents."""
    for name, count in shares.items():
        made = PROSE if name.startswith("web") else CODE
        rows = (
            json.dumps({"text": "\n".join(f"{made} {i} {name} {j}" for j in range(1 + i % 5))}) for i in range(count)
        )
        text = "\n".join(rows).encode()
        (work / f"{name}.jsonl{'.gz' if name.endswith('z') else ''}").write_bytes(
            gzip.compress(text) if name.endswith("z") else text
        )
    return [{"name": name, "path": f"{name}.jsonl*"} for name in shares]


@pytest.mark.parametrize(
    "shares", [{"web": 1500, "code": 1500}, {"code": 200, "web": 3000}, {"web": 2500, "code z": 2000}]
)
def test_a_plan_measures_every_source_and_warns_of_a_filter_that_drops_most_of_one(
    tmp_path: Path, shares: dict[str, int]
) -> None:
    config = corpus(tmp_path, clean=GOPHER)
    config["sources"] = mixed(tmp_path, shares)
    (tmp_path / "c.json").write_text(json.dumps(config))
    planned = output_of(warm.run("-m", "data_prep", "plan", "--config", "c.json", cwd=tmp_path, imported="data_prep"))
    (code,) = [name for name in shares if name.startswith("code")]
    assert f"warning: {code}: gopher_quality drops 100% of" in planned
    assert "sources.N.clean" in planned
    assert "web: gopher" not in planned
    prep(tmp_path, config)
    rows, _, _ = read_stats(str(tmp_path / "tokens"))
    estimated = int(re.search(r"about ([\d,]+) tokens", planned)[1].replace(",", ""))
    assert 1 / 1.5 < estimated / sum(row.tokens for row in rows) < 1.5
