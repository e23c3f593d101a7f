"""The commands `plan`, `status` and `stats`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from data_prep.formats.tokenfile import open_split
from data_prep.job.progress import Display
from data_prep.task import Counts
from headrace.base.directory import read_manifest

COMMAND = [sys.executable, "-m", "data_prep"]


def test_plan_prints_the_tasks_and_writes_nothing(mixed_config: str, work: Path, cli: Any) -> None:
    before = sorted(path.name for path in work.rglob("*"))
    assert "map tasks" in cli("plan", "--config", mixed_config).stdout
    assert sorted(path.name for path in work.rglob("*")) == before


def test_status_follows_a_job_from_another_process(mixed_config: str, cli: Any) -> None:
    assert "there is no job" in cli("status", "--config", mixed_config, code=2).stderr
    cli("prepare", "--config", mixed_config)
    before = cli("status", "--config", mixed_config).stdout
    assert "map: 0 of" in before
    assert "reduce: waiting" in before
    cli("phase", "map", "--config", mixed_config, "--task", "0", "--of", "2")
    share = cli("status", "--config", mixed_config).stdout
    assert "ended map" in share
    assert "reduce: waiting" in share
    cli("--config", mixed_config)
    assert "tokens is finished" in cli("status", "--config", mixed_config).stdout


def test_status_names_a_running_process(mixed_config: str, work: Path, cli: Any) -> None:
    texts = "".join(json.dumps({"text": f"{i} la rivière " * 400}) + "\n" for i in range(12_000))
    (work / "plain.jsonl").write_text(texts)
    cli("prepare", "--config", mixed_config, "--set", "task_bytes=2000000")
    job = [*COMMAND, "--config", mixed_config, "--set", "task_bytes=2000000", "--workers", "1"]
    with subprocess.Popen(job, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        printed = ""
        while process.poll() is None and f":{process.pid} map" not in printed:
            printed = cli("status", "--config", mixed_config, "--set", "task_bytes=2000000").stdout
            time.sleep(0.05)
        process.kill()
    assert f":{process.pid} map" in printed
    assert "MB/s" in printed


def test_stats_add_up_to_the_manifest(finished: Path, cli: Any) -> None:
    shown = cli("stats", "tokens").stdout
    for split in ("train", "heldout"):
        _, entry = open_split(finished / "tokens", split=split)
        assert set(entry["sources"]) <= {"texts", "lines", "rows"}
        for key in ("documents", "tokens", "bytes"):
            assert sum(sums[key] for sums in entry["sources"].values()) == entry[key]
            assert sum(shard[key] for shard in entry["shards"]) == entry[key]
        for sums in entry["sources"].values():
            assert sum(sums["lengths"]) == sums["documents"]
            assert f"{sums['tokens']:,}" in shown
    cli("stats", "tokens", "--html", "stats.html")
    assert "<svg" in (finished / "stats.html").read_text()


def test_plan_estimates_tokens_and_time(work: Path, write_config: Any, cli: Any) -> None:
    texts = (f"{i} la rivière turns the wheel of the mill. " * 40 for i in range(2000))
    (work / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = write_config(sources=[{"path": "rows.jsonl"}], tokenizer={"train": "bpe", "vocab_size": 400})
    printed = cli("plan", "--config", config, "--workers", "2").stdout
    cli("--config", config)
    splits = read_manifest(work / "tokens", kind="tokens").details["splits"]
    tokens = sum(split["tokens"] for split in splits.values())
    estimated = re.search(r"about ([\d,]+) tokens", printed)
    assert estimated is not None, printed
    # the estimate uses a tokenizer with another vocabulary, so only the order of magnitude is right
    assert tokens / 4 < int(estimated[1].replace(",", "")) < 4 * tokens
    assert re.search(r"about \d+ s on 2 workers at [\d.]+ MB/s each", printed), printed


def test_the_progress_line_has_the_most_frequent_reasons_for_drops_first(tmp_path: Path) -> None:
    note = tmp_path / "progress" / "map-00000.json"
    with Display("map", total_bytes=1000, done_bytes=100, note=note) as display:
        assert json.loads(note.read_text())["share"] == 0.1  # at once, before the first task reports
        display.add(Counts(input_bytes=400, text_bytes=380, documents=3, tokens=95, dropped=Counter({"c4: short": 2})))
        display.add(Counts(dropped=Counter({"pii: none": 5, "c4: short": 1})))
        line = display.line()
        assert display.share() == 0.5
    most_first = r"MB/s, [\d,]+ documents/s, 95 tokens, dropped 5 pii: none, 3 c4: short, \d+:\d\d left"
    assert re.search(most_first, line), line
    assert json.loads(note.read_text())["ended"]


def test_the_age_of_a_status_note_is_measured_by_the_clock_of_the_file_system(
    mixed_config: str, work: Path, cli: Any
) -> None:
    cli("prepare", "--config", mixed_config)
    note = work / ".tokens.job/progress/map-00000.json"
    with Display("map", total_bytes=10, note=note) as display:
        running = json.dumps(display.status_note())
    note.write_text(running)
    assert "silent" not in cli("status", "--config", mixed_config).stdout
    long_ago = time.time() - 3600
    os.utime(note, (long_ago, long_ago))
    assert re.search(r"map 0% .*silent for 3,6\d\d s", cli("status", "--config", mixed_config).stdout)
