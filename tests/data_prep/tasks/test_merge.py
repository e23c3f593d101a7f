"""Merge tasks, as in very large jobs: the shards are the same as without them."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from data_prep.config.corpus import load
from data_prep.job import phases
from data_prep.job.directory import Job
from data_prep.tasks import merge, runs_reader
from data_prep.tasks.sorted_runs import SortedRun, SortedRunPaths
from tests.data_prep.conftest import cli, tree, write_config

Tree = dict[str, bytes]
IMPORTS = "import sys; from data_prep.dedup import merge_tasks, table; from data_prep.tasks import runs_reader, merge"
SMALL_LIMITS = "merge_tasks.MOST_RUNS = merge.MOST_RUNS = 4; merge._MERGED_BYTES = 4000; table.MEMORY = 8000; "
SMALL_LIMITS += (
    "runs_reader._MIN_BUFFER_BYTES = runs_reader._MAX_BUFFER_BYTES = 2000; from data_prep.__main__ import main"
)


def run_with_small_limits(work: Path, *arguments: str, code: int = 0) -> str:
    """Runs a command in which runs are merged from 5 runs on, and the memory limits are small."""
    program = f"{IMPORTS}; {SMALL_LIMITS}; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=work, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def run_all(work: Path, config: str, *, shares: int = 1, of_dedup: Sequence[str] = ()) -> None:
    """Runs all phases one by one, so that the limits also hold in the processes that plan them.

    of_dedup: names of which the dedup directory must have several in the end.
    """
    run_with_small_limits(work, "prepare", "--config", config)
    for phase in phases.phases_of(load(work / config, [])):
        for share in range(shares):
            run_with_small_limits(
                work, "phase", phase.name, "--config", config, "--task", str(share), "--of", str(shares)
            )
    assert len(list((work / ".tokens.job/merge").glob("[0-9]*"))) > 3
    for name in of_dedup:
        assert len(list((work / ".tokens.job/dedup").glob(f"{name}-*"))) > 3
    run_with_small_limits(work, "finish", "--config", config)


def shards(tokens: Path) -> Tree:
    return {name: content for name, content in tree(tokens).items() if name != "manifest.json"}


def test_merged_runs_give_the_same_shards(mixed_config: str, finished_work: Path, work: Path) -> None:
    run_all(work, mixed_config, shares=2)
    assert tree(work / "tokens") == tree(finished_work / "tokens")


def test_merged_runs_give_the_same_duplicates_and_loss_masks(work: Path) -> None:
    talk = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}. " * (i % 9)}]}
        for i in range(200)
    ]
    texts = [{"text": f"{i % 120} turns the wheel of the mill " * 5} for i in range(200)]
    for name, rows in (("talk.jsonl", talk), ("texts.jsonl", texts)):
        (work / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    (work / "chat.jinja").write_text(template)
    config = write_config(
        sources=[{"path": "texts.jsonl"}, {"path": "talk.jsonl", "messages_field": "messages"}],
        tokenizer={"train": "bpe", "vocab_size": 300, "chat_template": "chat.jinja"},
        dedup={"exact": True, "near": {}},
        list_dropped="reasons",
        task_bytes=1500,
        shard_tokens=700,
    )
    run_all(work, config, of_dedup=("exact-table", "near-table"))
    cli("--config", config, "--set", "output=plain")
    made, plain = (shards(work / output) for output in ("tokens", "plain"))
    assert made == plain
    assert any(name.endswith(".mask") for name in made)
    assert made["dropped.jsonl"].count(b"\n") > 50


def test_a_reduce_before_the_merge_is_an_error_and_a_killed_merge_is_retried(
    mixed_config: str, finished_work: Path, work: Path
) -> None:
    run_with_small_limits(work, "prepare", "--config", mixed_config)
    run_with_small_limits(work, "phase", "map", "--config", mixed_config, "--task", "0", "--of", "1")
    assert "merge tasks have not finished" in run_with_small_limits(
        work, "phase", "reduce", "--config", mixed_config, "--task", "0", "--of", "1", code=2
    )
    kill = f"import os, signal; {IMPORTS}; {SMALL_LIMITS}; from data_prep import task"
    kill += "; sync = task.sync; task.sync = lambda path: (sync(path), os.kill(os.getpid(), signal.SIGKILL))"
    run = "phases._MERGE.tasks(phases.load_prepared_job(load(Path(sys.argv[1]), [])))[1].run(lambda counts: None)"
    kill += (
        f"; from pathlib import Path; from data_prep.job import phases; from data_prep.config.corpus import load; {run}"
    )
    killed = subprocess.run([sys.executable, "-c", kill, mixed_config], cwd=work, check=False)
    assert killed.returncode == -9
    assert list((work / ".tokens.job/merge").glob(".*.partial"))
    run_with_small_limits(work, "phase", "merge", "--config", mixed_config, "--task", "0", "--of", "1")
    run_with_small_limits(work, "phase", "reduce", "--config", mixed_config, "--task", "0", "--of", "1")
    run_with_small_limits(work, "finish", "--config", mixed_config)
    assert tree(work / "tokens") == tree(finished_work / "tokens")


def test_merging_reduces_opened_runs(mixed_config: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("prepare", "--config", mixed_config)
    cli("phase", "map", "--config", mixed_config, "--task", "0", "--of", "1")
    monkeypatch.chdir(work)
    monkeypatch.setattr(runs_reader, "_MIN_BUFFER_BYTES", 1000)
    monkeypatch.setattr(runs_reader, "_MAX_BUFFER_BYTES", 1000)
    config = load(Path(mixed_config), [])
    opened = 0
    original = SortedRun.open

    def counting(path: Path, *, whole: bool = False) -> SortedRun:
        nonlocal opened
        opened += not whole
        return original(path, whole=whole)

    monkeypatch.setattr(SortedRun, "open", staticmethod(counting))

    def opens(*lists: Callable[[Job], Any]) -> int:
        nonlocal opened
        opened = 0
        for tasks in lists:
            for task in tasks(Job(config)):
                task.run(lambda _counts: None)
        return opened

    plain = opens(phases._REDUCE.tasks)
    for marker in Path(".tokens.job/reduce").glob("*.json"):
        marker.unlink()
    monkeypatch.setattr(merge, "MOST_RUNS", 4)
    merged = opens(phases._MERGE.tasks, phases._REDUCE.tasks)
    assert merged < 0.6 * plain


def test_memory_of_a_merge_is_limited(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are in the order of the input: those of one task are of one or two of many sources."""
    names = [f"{chr(ord('a') + i)}.jsonl" for i in range(8)]
    for name in names:
        (work / name).write_text("".join(json.dumps({"text": f"{name} {i} " * 40}) + "\n" for i in range(40)))
    config = write_config(sources=[{"path": name} for name in names], task_bytes=4000)
    cli("prepare", "--config", config)
    cli("phase", "map", "--config", config, "--task", "0", "--of", "1")
    monkeypatch.chdir(work)
    monkeypatch.setattr(runs_reader, "_MIN_BUFFER_BYTES", 20_000)
    monkeypatch.setattr(runs_reader, "_MAX_BUFFER_BYTES", 20_000)
    monkeypatch.setattr(merge, "MOST_RUNS", 4)
    most = 0
    original = runs_reader.RunsReader.ranges

    def measured(self: Any, *given: Any) -> Any:
        nonlocal most
        for part in original(self, *given):
            most = max(most, sum(map(len, part.ids)) + runs_reader._DOCUMENT_BYTES * len(part.ids))
            yield part

    monkeypatch.setattr(runs_reader.RunsReader, "ranges", measured)
    job = Job(load(Path(config), []))
    for phase in (phases._MERGE.tasks, phases._REDUCE.tasks):
        for task in phase(job):
            task.run(lambda _counts: None)
    assert 0 < most < 2 * 20_000


def test_run_paths_are_a_sequence_in_task_order_that_can_be_sliced_and_pickled() -> None:
    paths = SortedRunPaths(Path("map"), (2, 0, 1, 3))
    listed = ["00000/run-000", "00000/run-001", "00002/run-000", *(f"00003/run-00{i}" for i in range(3))]
    assert [path.relative_to("map").as_posix() for path in paths] == listed
    assert len(paths) == 6
    for start in range(7):
        for end in range(start, 8):
            part = pickle.loads(pickle.dumps(paths[start:end]))
            assert list(part) == list(paths)[start:end]
            assert list(part[1:3]) == list(paths)[start:end][1:3]
    assert list(SortedRunPaths(Path("map"), ())) == []
