"""What `plan`, `status` and `stats` tell of a job and of its output."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from data_prep.tokenfile import open_split

COMMAND = [sys.executable, "-m", "data_prep"]


def test_a_plan_tells_the_tasks_and_writes_nothing(mixed_config: str, work: Path, cli: Any) -> None:
    before = sorted(path.name for path in work.rglob("*"))
    told = cli("plan", "--config", mixed_config).stdout
    assert "map tasks" in told
    assert sorted(path.name for path in work.rglob("*")) == before


def test_status_follows_a_job_from_another_process(mixed_config: str, cli: Any) -> None:
    assert "there is no job" in cli("status", "--config", mixed_config, code=2).stderr
    cli("prepare", "--config", mixed_config)
    before = cli("status", "--config", mixed_config).stdout
    assert "map: 0 of" in before
    assert "reduce: waits" in before
    cli("phase", "map", "--config", mixed_config, "--task", "0", "--of", "2")
    share = cli("status", "--config", mixed_config).stdout
    assert "ended map" in share
    assert "reduce: waits" in share
    cli("--config", mixed_config)
    assert "tokens is finished" in cli("status", "--config", mixed_config).stdout


def test_status_names_a_process_that_works_this_moment(mixed_config: str, work: Path, cli: Any) -> None:
    texts = "".join(json.dumps({"text": f"{i} la rivière " * 400}) + "\n" for i in range(30_000))
    (work / "plain.jsonl").write_text(texts)
    cli("prepare", "--config", mixed_config, "--set", "task_bytes=2000000")
    job = [*COMMAND, "--config", mixed_config, "--set", "task_bytes=2000000", "--workers", "1"]
    with subprocess.Popen(job, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        said = ""
        while process.poll() is None and f":{process.pid} map" not in said:
            said = cli("status", "--config", mixed_config, "--set", "task_bytes=2000000").stdout
            time.sleep(0.05)
        process.kill()
    assert f":{process.pid} map" in said
    assert "MB/s" in said


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
