"""Determinism and atomicity on the command line: the same bytes for any workers, order, retries or kills; no partial
output."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from data_prep.formats.tokenfile import TokenFile, open_split
from tests.data_prep.conftest import cli, tree, write_config
from tests.support import wait_until

Tree = dict[str, bytes]
COMMAND = [sys.executable, "-m", "data_prep"]


@pytest.fixture
def reference(finished_work: Path) -> Tree:
    return tree(finished_work / "tokens")


def start(work: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=work,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_map_tasks(work: Path, process: subprocess.Popen[str], count: int) -> None:
    while process.poll() is None and len(list(work.glob(".tokens.job/map/[0-9]*/done.json"))) < count:
        time.sleep(0.01)


def session_members(session: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_for_exit(session: int) -> None:
    wait_until(lambda: not session_members(session), said=lambda: "workers outlive their coordinator")


def test_two_workers_write_the_same_bytes_as_one(mixed_config: str, reference: Tree, work: Path) -> None:
    cli("--config", mixed_config, "--workers", "2")
    assert tree(work / "tokens") == reference
    assert [path.name for path in work.glob(".*")] == [".headrace-tokenizers"]


def test_with_an_id_field_the_shards_do_not_depend_on_the_files_of_the_records(work: Path) -> None:
    rows = [{"text": f"Document {i} of the mill", "id": f"urn:{i}" if i % 2 else i} for i in range(200)]
    (work / "one").mkdir()
    (work / "one/all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "two").mkdir()
    with gzip.open(work / "two/b.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows[150:]))
    (work / "two/c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows[:150])))
    cli("--config", write_config(sources=[{"path": "one", "name": "rows"}], output="made"))
    given = {"tokenizer": {"path": "made/tokenizer"}, "shard_tokens": 500}
    shards = []
    for path, id_field in (("one", "id"), ("two", "id"), ("two", None)):
        source = {"path": path, "name": "rows", "id_field": id_field}
        cli("--config", write_config(sources=[source], output=f"{path}-{id_field}", **given))
        shards.append({k: v for k, v in tree(work / f"{path}-{id_field}").items() if "shard-" in k})
    assert shards[0] == shards[1]
    assert len(shards[0]) >= 8
    assert shards[2] != shards[1]


def test_with_ids_that_are_not_unique_shards_are_even_and_shuffled(work: Path) -> None:
    rows = [{"text": f"{i} is a number of the mill", "id": "en"} for i in range(2000)]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cli("--config", write_config(sources=[{"path": "rows.jsonl", "id_field": "id"}], shard_tokens=2000))
    prefixes, _ = open_split(work / "tokens", split="train")
    files = [TokenFile.open(prefix) for prefix in prefixes]
    assert len(files) > 5
    mean = sum(file.documents for file in files) / len(files)
    assert all(0.7 * mean < file.documents < 1.4 * mean for file in files)
    tokenizer = Tokenizer.from_file(str(work / "tokens/tokenizer/tokenizer.json"))
    first = tokenizer.decode(files[0].tokens.tolist()).split(" is a number of the mill")[:20]
    assert [int(number) for number in first] != sorted(int(number) for number in first)


def test_shares_of_phases_run_in_any_order_write_the_same_bytes(mixed_config: str, reference: Tree, work: Path) -> None:
    cli("prepare", "--config", mixed_config)
    failed = cli("phase", "reduce", "--config", mixed_config, "--task", "0", "--of", "1", code=2)
    assert "map tasks have not finished" in failed.stderr
    for phase in ("map", "reduce"):
        for task in (1, 0, 1):  # share 1 twice: the second time it has nothing to do
            cli("phase", phase, "--config", mixed_config, "--task", str(task), "--of", "2")
        if phase == "map":
            assert "reduce tasks have not finished" in cli("finish", "--config", mixed_config, code=2).stderr
    assert not (work / "tokens").exists()
    cli("finish", "--config", mixed_config)
    assert tree(work / "tokens") == reference


def test_a_run_killed_repeatedly_ends_with_the_same_bytes(mixed_config: str, reference: Tree, work: Path) -> None:
    finished = kills = 0
    while kills < 40:
        process = start(work, "--config", mixed_config, "--workers", "1")
        wait_for_map_tasks(work, process, finished + 9)  # of 45 tasks: at most 5 kills
        if process.poll() is not None:
            break
        assert not (work / "tokens").exists() or tree(work / "tokens") == reference
        os.kill(process.pid, signal.SIGKILL)  # the coordinator alone: its workers must exit by themselves
        process.wait()
        wait_for_exit(process.pid)
        kills += 1
        finished = len(list(work.glob(".tokens.job/map/[0-9]*/done.json")))
    assert process.returncode == 0
    assert kills  # each with some map tasks finished and some not
    assert tree(work / "tokens") == reference
    assert [path.name for path in work.glob(".*")] == [".headrace-tokenizers"]


@pytest.mark.parametrize("delay_s", [0.5, 0.9, 1.3])
def test_a_kill_at_any_moment_leaves_no_partial_output(mixed_config: str, work: Path, delay_s: float) -> None:
    process = start(work, "--config", mixed_config, "--workers", "2")
    time.sleep(delay_s)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if (work / "tokens").exists():
        cli("verify", "tokens")
    cli("--config", mixed_config, "--workers", "2")
    cli("verify", "tokens")


def test_ctrl_c_ends_a_run_soon_and_it_resumes(mixed_config: str, work: Path) -> None:
    process = start(work, "--config", mixed_config, "--workers", "2")
    wait_for_map_tasks(work, process, 2)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130
    assert time.monotonic() - began < 60  # 0.03 s on a quiet machine
    assert "Traceback" not in output
    wait_for_exit(process.pid)
    assert "were finished before" in cli("--config", mixed_config).stderr


def test_a_finished_output_is_not_changed_and_a_leftover_job_directory_is_removed(finished: Path) -> None:
    """As after a kill between the commit and the removal of the job directory."""
    before = (finished / "tokens" / "manifest.json").stat().st_mtime_ns
    (finished / ".tokens.job").mkdir()
    assert "exists already" in cli("--config", "corpus.json").stdout
    assert (finished / "tokens" / "manifest.json").stat().st_mtime_ns == before
    assert not (finished / ".tokens.job").exists()


def test_an_output_of_another_config_or_other_inputs_is_an_error(finished: Path) -> None:
    before = (finished / "tokens" / "manifest.json").read_bytes()
    assert "config.seed" in cli("--config", "corpus.json", "--set", "seed=1", code=2).stderr
    (finished / "texts" / "new.md").write_text("one more")
    assert "inputs" in cli("--config", "corpus.json", code=2).stderr
    assert (finished / "tokens" / "manifest.json").read_bytes() == before


def test_an_unfinished_job_resumes_only_with_the_same_config_and_inputs(mixed_config: str, work: Path) -> None:
    cli("prepare", "--config", mixed_config)
    error = cli("--config", mixed_config, "--set", "seed=1", code=2).stderr
    assert "config.seed" in error
    assert "rm -r .tokens.job" in error
    assert (
        "config.seed"
        in cli("phase", "map", "--config", mixed_config, "--task", "0", "--of", "1", "--set", "seed=1", code=2).stderr
    )
    (work / "texts" / "0.md").write_text("another size")
    assert "inputs" in cli("--config", mixed_config, code=2).stderr
    error = cli("phase", "map", "--config", mixed_config, "--task", "0", "--of", "1", code=2).stderr
    assert "since the job was planned" in error


def test_a_second_coordinator_is_an_error(mixed_config: str, work: Path) -> None:
    cli("prepare", "--config", mixed_config)
    with (work / ".tokens.job" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # as a map task holds it
        for command in ([], ["prepare"], ["finish"]):
            assert "another process is working" in cli(*command, "--config", mixed_config, code=2).stderr
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a coordinator holds it
        error = cli("phase", "map", "--config", mixed_config, "--task", "0", "--of", "1", code=2)
        assert "another process is working" in error.stderr


def test_every_text_is_in_exactly_one_split(mixed_config: str, work: Path) -> None:
    (work / "texts" / "copy.md").write_bytes((work / "texts" / "0.md").read_bytes())
    cli("--config", mixed_config)
    tokenizer = Tokenizer.from_file("tokens/tokenizer/tokenizer.json")
    found: dict[str, list[str]] = {}
    for split in ("train", "heldout"):
        prefixes, entry = open_split("tokens", split=split)
        rows = [row for prefix in prefixes for row in rows_of(TokenFile.open(prefix))]
        assert len(rows) == entry["documents"]
        assert sum(map(len, rows)) == entry["tokens"]
        assert all(row[-1] == 0 and 0 not in row[:-1] for row in rows)  # eos is id 0 and ends each document
        found[split] = [tokenizer.decode(row[:-1]) for row in rows]
        assert sum(len(text.encode()) for text in found[split]) == entry["bytes"]
    assert not set(found["train"]) & set(found["heldout"])
    assert sorted(found["train"] + found["heldout"]) == sorted(all_texts(work))


def rows_of(file: TokenFile) -> list[list[int]]:
    ends = file.sequence_lengths.cumsum().tolist()
    return [file.tokens[start:end].tolist() for start, end in zip([0, *ends], ends, strict=False)]


def all_texts(work: Path) -> list[str]:
    packed = gzip.decompress((work / "packed.jsonl.gz").read_bytes())
    lines = ((work / "plain.jsonl").read_bytes() + packed).decode().splitlines()
    return [
        *(path.read_text() for path in (work / "texts").rglob("*.md")),
        *(json.loads(line)["text"] for line in lines),
        *pq.read_table(work / "rows.parquet")["text"].to_pylist(),
    ]


def documents_of(tokens: Path, split: str) -> list[tuple[str, bytes]]:
    """(source, ids) of every document, in the order of the shards."""
    prefixes, entry = open_split(tokens, split=split)
    found = []
    for prefix, shard in zip(prefixes, entry["shards"], strict=True):
        file = TokenFile.open(prefix)
        assert (file.documents, len(file.tokens)) == (shard["documents"], shard["tokens"])
        ends = np.cumsum(file.sequence_lengths)
        found += [(shard["source"], ids.tobytes()) for ids in np.split(np.asarray(file.tokens), ends[:-1])]
    return found


def test_each_shard_has_one_source_and_about_the_configured_size(finished: Path) -> None:
    _, entry = open_split(finished / "tokens", split="train")
    for source, sums in entry["sources"].items():
        sizes = [shard["tokens"] for shard in entry["shards"] if shard["source"] == source]
        assert sum(sizes) == sums["tokens"]
        assert len(sizes) == -(-sums["tokens"] // 5000)
        assert max(sizes) < 2 * 5000


def test_the_order_of_documents_is_a_shuffle_that_does_not_depend_on_the_task_size(finished: Path) -> None:
    shards = {name: data for name, data in tree(finished / "tokens").items() if "shard" in name}
    order = documents_of(finished / "tokens", "train")
    config = json.loads((finished / "corpus.json").read_text())
    (finished / "other.json").write_text(json.dumps(config | {"task_bytes": 100_000, "output": "uncut"}))
    cli("--config", "other.json")
    uncut = {name: data for name, data in tree(finished / "uncut").items() if "shard" in name}
    assert uncut == shards
    (finished / "other.json").write_text(json.dumps(config | {"seed": 7, "output": "reseeded"}))
    cli("--config", "other.json", "--set", 'tokenizer={"path": "tokens/tokenizer"}')
    again = documents_of(finished / "reseeded", "train") + documents_of(finished / "reseeded", "heldout")
    assert again != order
    assert sorted(again) == sorted(order + documents_of(finished / "tokens", "heldout"))


def test_verify_names_corrupted_and_missing_files(finished: Path) -> None:
    assert "checksums" in cli("verify", "tokens").stdout
    shard = finished / "tokens" / "train" / "shard-00001.bin"
    raw = bytearray(shard.read_bytes())
    raw[7] ^= 1
    shard.write_bytes(raw)
    (finished / "tokens" / "heldout" / "shard-00000.idx").unlink()
    error = cli("verify", "tokens", code=2).stderr
    assert "train/shard-00001.bin" in error
    assert "heldout/shard-00000.idx" in error
    assert "train/shard-00000.bin" not in error
