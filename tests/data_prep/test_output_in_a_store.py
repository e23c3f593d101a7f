"""A job whose output is a URL: the bytes of a local one, uploaded as its tasks finish, on a real S3 server (moto)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep.__main__ import main as prep
from foundation.directory import MANIFEST, read_manifest
from foundation.errors import DataError
from foundation.lock import lock_file
from foundation.remote_directory import CACHE, fetch
from foundation.remote_output import local_output
from foundation.storage import objects_below
from tests.data_prep.conftest import cli_of_its_own, text_folder, tree, write_config
from tests.data_prep.in_process import run_job
from tests.object_store import Faulty, s3_server

URL = "s3://corpora/web/tokens"


@pytest.fixture
def faults() -> Faulty:
    return Faulty()


@pytest.fixture
def store(work: Path, faults: Faulty, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(CACHE, str(work / "cache"))
    with s3_server("corpora", between=faults.between) as files:
        yield files


def left(work: Path) -> list[str]:
    """What is on this host of outputs."""
    return [path.name for path in (work / "cache/outputs").rglob("*") if not path.name.endswith(".lock")]


@pytest.mark.usefixtures("store")
def test_a_job_writes_the_bytes_of_a_local_one_and_a_second_start_finds_them(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text_folder(work)
    run_job(write_config())
    run_job(write_config("remote.json", output=URL))
    assert "GB are free" in capsys.readouterr().err
    fetch(URL, work / "back")
    assert tree(work / "back") == tree(work / "tokens")
    assert read_manifest(work / "back", kind="tokens").parents == read_manifest(work / "tokens", kind="tokens").parents
    assert left(work) == []
    run_job("remote.json")
    assert left(work) == []
    with pytest.raises(DataError, match=f"{URL} exists, and was made differently: config.seed|seed"):
        run_job(write_config("other.json", output=URL, seed=7))


def test_a_place_that_is_taken_or_cannot_be_written_is_refused_before_work(store: Any, work: Path) -> None:
    text_folder(work)
    store.pipe_file(f"{URL}/{MANIFEST}", b"{}")
    with pytest.raises(DataError, match="is damaged"):
        run_job(write_config(output=URL))
    with pytest.raises(DataError, match="cannot be"):
        run_job(write_config(output="s3://no-such-bucket/tokens"))
    assert left(work) == []


def shards() -> set[str]:
    """The names of the shards' files that are there."""
    return {name for name in objects_below(URL) if name.startswith(("train/", "heldout/"))}


def writes(faults: Faulty) -> list[str]:
    """The shards' files that were written, in order, as often as they were."""
    pairs = [(method, path.partition("/tokens/")[2]) for method, path in faults.requests]
    return [name for method, name in pairs if method == "PUT" and name.startswith(("train/", "heldout/"))]


def stop_at_the_end(config: str, patch: pytest.MonkeyPatch) -> None:
    """Runs a job until its shards are uploaded, and no further."""
    with patch.context() as within:
        within.setattr("data_prep.job.phases.finish", _stop)
        with pytest.raises(KeyboardInterrupt):
            run_job(config)


def _stop(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_shards_are_uploaded_when_their_tasks_finish_and_neither_kept_here_nor_sent_again(
    store: Any, faults: Faulty, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_folder(work)
    config = write_config(output=URL, shard_tokens=3000)
    stop_at_the_end(config, monkeypatch)
    first = sorted(writes(faults))
    assert set(first) == shards()
    assert len(first) > 4
    assert not store.exists(f"{URL}/{MANIFEST}")
    assert not list((work / "cache").rglob("shard-*.bin"))
    job = local_output(URL).parent / ".tokens.job"
    lost, redone = [job / "reduce" / f"train-0000{number}.json" for number in (0, 1)]
    redone.unlink()  # as if it was killed between the upload and the marker
    store.rm(f"{URL}/train/shard-00000.idx")
    assert lost.is_file()
    store.pipe_file(f"{URL}/train/shard-00077.bin", b"of a job with more shards")
    faults.requests.clear()
    run_job(config)
    assert writes(faults) == ["train/shard-00000.idx"]
    run_job(write_config("local.json", shard_tokens=3000))
    fetch(URL, work / "back")
    assert tree(work / "back") == tree(work / "tokens")
    assert set(objects_below(URL)) == set(tree(work / "back"))
    assert left(work) == []


def test_what_an_abandoned_job_left_is_refused_to_another_and_cleaned_by_a_verb(
    store: Any, faults: Faulty, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text_folder(work)
    config = write_config(output=URL)
    stop_at_the_end(config, monkeypatch)
    there = set(objects_below(URL))
    store.pipe_file(f"{URL}/notes.txt", b"of a person")
    with monkeypatch.context() as patch:
        patch.setenv(CACHE, str(work / "another"))
        with pytest.raises(DataError, match=f"unfinished job with other settings.*\n  try: headrace prep clean {URL}"):
            run_job(write_config("other.json", output=URL, seed=7))
        faults.requests.clear()
        stop_at_the_end(config, patch)  # the same job, on a host that has nothing of it
        assert writes(faults) == []
        assert set(objects_below(URL)) == there | {"notes.txt"}
    capsys.readouterr()
    assert prep(["clean", URL, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert all(f"{URL}/{name}\n" in out for name in there)
    assert f"would delete {len(there)} objects" in out
    assert there < set(objects_below(URL))
    assert left(work)
    with lock_file(local_output(URL).parent / ".tokens.job/lock", doing="working"):  # a job of this host is alive
        assert prep(["clean", URL]) == 2
    assert there < set(objects_below(URL))
    assert prep(["clean", f"{URL}/"]) == 0
    assert set(objects_below(URL)) == {"notes.txt"}
    assert left(work) == []
    run_job(config)
    finished = set(objects_below(URL))
    assert prep(["verify", URL]) == 0
    assert prep(["stats", URL]) == 0
    capsys.readouterr()
    assert prep(["clean", URL]) == 0
    assert "no job has left anything in" in capsys.readouterr().out
    assert set(objects_below(URL)) == finished
    store.pipe_file(f"{URL}/sources.jsonl", b"changed")
    assert prep(["verify", URL]) == 2
    assert f"{URL}/sources.jsonl" in capsys.readouterr().err
    assert prep(["clean", str(work)]) == 2
    assert "rm -r .NAME.job" in capsys.readouterr().err


def test_a_job_that_was_killed_after_its_manifest_is_finished_by_the_next_start(
    store: Any, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_folder(work)
    config = write_config(output=URL)
    with monkeypatch.context() as patch:
        patch.setattr("data_prep.job.uploads.release", _stop)
        with pytest.raises(KeyboardInterrupt):
            run_job(config)
    assert store.exists(f"{URL}/{MANIFEST}")
    run_job(config)
    assert not [name for name in objects_below(URL) if name.startswith(".")]
    assert left(work) == []


@pytest.mark.integration
@pytest.mark.usefixtures("store")
def test_shares_of_several_hosts_need_a_directory_that_all_share(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text_folder(work)
    config = write_config(output=URL)
    monkeypatch.delenv(CACHE)
    done = cli_of_its_own("share", "--config", config, "--task", "0", "--of", "1", code=2)
    assert f"export {CACHE}=/shared/DIRECTORY on all hosts" in done.stderr
    monkeypatch.setenv(CACHE, str(work / "cache"))
    done = cli_of_its_own("share", "--config", config, "--task", "0", "--of", "1")
    assert f"output: {URL}, fingerprint" in done.stdout
    assert "is finished" in cli_of_its_own("status", "--config", config).stdout


@pytest.mark.integration
def test_a_job_that_is_killed_four_times_equals_an_undisturbed_one(
    store: Any, mixed_config: str, finished_work: Path, work: Path
) -> None:
    command = [sys.executable, "-m", "data_prep", "--config", mixed_config, "--workers", "1", "--set", f"output={URL}"]
    job = local_output(URL).parent / ".tokens.job"
    for kill in range(1, 4):
        process = subprocess.Popen(command, cwd=work, start_new_session=True)
        while process.poll() is None and len(list(job.glob("map/[0-9]*/done.json"))) < 6 * kill:
            time.sleep(0.01)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not store.exists(f"{URL}/{MANIFEST}")
    process = subprocess.Popen(command, cwd=work, start_new_session=True)
    while process.poll() is None and len(shards()) < 3:
        time.sleep(0.01)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)  # while shards are uploaded
    process.wait()
    assert not store.exists(f"{URL}/{MANIFEST}")
    subprocess.run(command, cwd=work, check=True)
    fetch(URL, work / "back")
    assert tree(work / "back") == tree(finished_work / "tokens")
    assert set(objects_below(URL)) == set(tree(work / "back"))
    assert left(work) == []
