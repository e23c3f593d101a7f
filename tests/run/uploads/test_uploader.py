"""What goes up to an object store, in which order, what is skipped and what is deleted there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from foundation.directory import MANIFEST, commit, fresh_staging
from foundation.errors import ConfigError, DataError
from foundation.lease import LeaseLostError, newest_lease, take_lease
from foundation.remote_run import (
    claim,
    fetch_checkpoint,
    local_run,
    pull,
    remote_checkpoints,
    working_directory,
)
from foundation.storage import StorageError, objects_below
from pipeline.cluster.status.run import read_status
from pipeline.cluster.status.text import lines_of
from pipeline.run.uploads import uploader as module
from pipeline.run.uploads.uploader import LINKS, Uploader, UploadTerms
from pipeline.run.uploads.uploads import _taken
from pipeline.runtime.launch.run_lock import exclusive_run
from tests.object_store import Faulty
from tests.support import wait_until

URL = "s3://store/runs/a"
SILENT_S = 3.0


def checkpoint(run_dir: Path, step: int, *, content: bytes = b"x") -> Path:
    """A finished checkpoint of two files."""
    final = run_dir / f"checkpoints/step-{step:08d}"
    staging = fresh_staging(final)
    for rank in range(2):
        (staging / f"__{rank}_0.distcp").write_bytes(content * 1000 + bytes([step, rank]))
    commit(staging, final, kind="checkpoint", config={}, details={"step": step}, replace=True)
    return final


class Started:
    """An uploader in threads of this process, and what it has told."""

    def __init__(self, keep: int | None = None, keep_every: int | None = None) -> None:
        self.run_dir = working_directory(URL)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        token = f"token-{time.monotonic_ns()}"
        claim(URL, token)
        self.lease = take_lease(URL, newest_lease(URL), token=token, silent_s=SILENT_S)
        self.told: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        terms = UploadTerms(keep, keep_every)
        self.uploader = Uploader(URL, self.run_dir, lease=self.lease, terms=terms, tell=self.told.append)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.uploader.run()
        except BaseException as error:
            self.error = error

    def steps(self, event: str) -> list[int]:
        return [each["step"] for each in self.told if each["event"] == event]

    def finish(self) -> None:
        self.uploader.ending = "backlog"
        wait_until(self._is_done, said=lambda: (self.told, self.uploader._row()))
        self.end()

    def _is_done(self) -> bool:
        if self.error is not None:
            raise self.error
        return any(each["event"] == "backlog_done" for each in self.told)

    def end(self) -> None:
        self.uploader.ending = "now"
        self.thread.join(120)
        assert not self.thread.is_alive()


@contextmanager
def started(**terms: Any) -> Iterator[Started]:
    made = Started(**terms)
    yield made
    made.finish()


def steps_there() -> list[int]:
    return [each.step for each in remote_checkpoints(URL)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_RETRY_S", 0.1)
    monkeypatch.setattr(module, "_LAST_RETRY_S", 0.5)


@pytest.mark.usefixtures("store")
def test_of_each_checkpoint_the_manifest_goes_up_last_and_is_deleted_first(faults: Faulty) -> None:
    with started(keep=1, keep_every=4) as run:
        (run.run_dir / "metrics.jsonl").write_text("{}\n")
        (run.run_dir / MANIFEST).write_text("{}\n")
        for step in (2, 4, 6, 8, 10):
            checkpoint(run.run_dir, step)
            wait_until(lambda step=step: step in run.steps("uploaded"))  # type: ignore[misc]
    assert steps_there() == [10, 8, 4]
    puts = [path.removeprefix("/store/runs/a/") for method, path in faults.requests if method == "PUT"]
    journal, shards = puts.index("metrics.jsonl"), puts.index("checkpoints/step-00000002.1/__0_0.distcp")
    assert journal < shards < puts.index(MANIFEST)  # the rows of its steps before, the run's manifest after
    for folder in ("step-00000002.1", "step-00000006.1"):
        there = [(method, path.rpartition("/")[2]) for method, path in faults.requests if f"{folder}/" in path]
        assert [name for method, name in there if method == "PUT"][-1] == MANIFEST
        assert next(name for method, name in there if method == "DELETE") == MANIFEST
        assert not objects_below(f"{URL}/checkpoints/{folder}")
    assert {"metrics.jsonl"} <= objects_below(URL).keys()
    assert not list((run.run_dir / LINKS).glob("*"))
    lease = newest_lease(URL)
    assert lease is not None
    assert lease.released


@pytest.mark.usefixtures("store")
def test_a_store_that_is_slower_than_checkpoints_gets_the_newest_and_those_kept_for_ever(faults: Faulty) -> None:
    run = Started(keep_every=4)
    faults.held = "*.distcp"
    for step in (1, 2, 3, 4, 5, 6):
        made = checkpoint(run.run_dir, step)
        wait_until(lambda step=step: any((run.run_dir / LINKS).glob(f"step-{step:08d}-*/{MANIFEST}")))  # type: ignore[misc]
        if step < 6:  # the run keeps one of them on disk
            made.rename(made.with_name(f".{made.name}.deleted"))
    wait_until(lambda: json.loads((run.run_dir / "uploads.json").read_text())["status"].get("backlog_bytes"))
    faults.held = None
    run.finish()
    assert {4, 6} <= {*run.steps("uploaded")}
    assert sorted([*run.steps("uploaded"), *run.steps("upload_skipped")]) == [1, 2, 3, 4, 5, 6]
    assert run.steps("upload_skipped")
    for each in remote_checkpoints(URL):
        fetch_checkpoint(each.url, run.run_dir / f"checkpoints/step-9999{each.step:04d}")  # compares every checksum


@pytest.mark.usefixtures("store")
def test_an_uploaded_checkpoint_is_not_dropped_as_superseded_before_it_is_forgotten(faults: Faulty) -> None:
    with started() as run:
        look, forget = run.uploader._find_checkpoints, run.uploader._forget
        # the other thread looks just then
        run.uploader._forget = lambda waiting: (look(), forget(waiting))[1]  # type: ignore[method-assign]
        faults.held = "*.distcp"
        checkpoint(run.run_dir, 1)
        wait_until(lambda: run.uploader._row()["uploading"] == 1)
        checkpoint(run.run_dir, 2)
        wait_until(lambda: run.uploader._row()["waiting"] == [2])
        faults.held = None
    assert (run.steps("uploaded"), run.steps("upload_skipped")) == ([1, 2], [])


@pytest.mark.usefixtures("store")
def test_faults_of_the_store_are_told_once_and_cost_nothing_but_time(faults: Faulty) -> None:
    run = Started()
    checkpoint(run.run_dir, 1)
    wait_until(lambda: run.steps("uploaded") == [1])
    faults.down = True
    checkpoint(run.run_dir, 2)
    wait_until(lambda: any(each["event"] == "upload_failing" for each in run.told))
    failing = next(each for each in run.told if each["event"] == "upload_failing")
    assert failing["durable_step"] == 1
    assert "reduce your request rate" in failing["error"]
    (run.run_dir / "metrics.jsonl").write_text('{"kind": "step", "step": 2, "time": "2026-11-27T00:00:00Z"}\n')
    with exclusive_run(run.run_dir):  # as rank 0 has it
        wait_until(lambda: "FAILING" in "\n".join(lines_of(read_status(run.run_dir))))
        lines = "\n".join(lines_of(read_status(run.run_dir)))
    assert "newest checkpoint of step 1, there since" in lines
    assert "MB/s: checkpoints of step 2" in lines
    faults.down = False
    wait_until(lambda: run.steps("uploaded") == [1, 2])
    run.finish()
    assert steps_there() == [2, 1]


@pytest.mark.usefixtures("store")
def test_an_answer_that_is_lost_makes_no_second_writer_of_the_manifest(faults: Faulty) -> None:
    with started() as run:
        faults.rate = 0.3
        for step in (1, 2, 3):
            checkpoint(run.run_dir, step)
            wait_until(lambda step=step: step in run.steps("uploaded"))  # type: ignore[misc]
        faults.rate = 0.0
    assert sum(faults.injected[kind] for kind in ("503", "reset", "stall", "lost")) > 3
    assert steps_there() == [3, 2, 1]
    assert not run.steps("upload_failed")


def test_a_checkpoint_of_which_the_store_has_lost_a_file_is_sent_again(store: Any, faults: Faulty) -> None:
    with started() as run:
        faults.held = "*__1_0.distcp"
        checkpoint(run.run_dir, 5)
        wait_until(lambda: store.exists(f"{URL}/checkpoints/step-00000005.1/__0_0.distcp"))
        store.rm_file(f"{URL}/checkpoints/step-00000005.1/__0_0.distcp")
        faults.held = None
        wait_until(lambda: run.steps("uploaded") == [5])
    [failing] = [each["error"] for each in run.told if each["event"] == "upload_failing"]
    assert "__0_0.distcp was sent with 1,002 bytes, and is not there" in failing


@pytest.mark.usefixtures("store")
def test_a_process_that_wakes_up_without_its_lease_writes_nothing_before_it_has_asked(tmp_path: Path) -> None:
    terms, first = UploadTerms(None, None), take_lease(URL, None, token="a", silent_s=0.1)
    uploader = Uploader(URL, tmp_path, lease=first, terms=terms, tell=lambda _event: None)
    take_lease(URL, first, token="b", silent_s=60)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    time.sleep(0.2)
    with pytest.raises(LeaseLostError):
        uploader._upload_small()
    assert "metrics.jsonl" not in objects_below(URL)


@pytest.mark.usefixtures("store")
def test_a_process_that_was_paused_stops_and_has_written_into_no_directory_of_its_successor(faults: Faulty) -> None:
    run = Started()
    faults.seconds = 0.3
    checkpoint(run.run_dir, 5, content=b"old")
    other = take_lease(URL, newest_lease(URL), token="another host", silent_s=SILENT_S)  # as after a long pause
    run.thread.join(120)
    assert isinstance(run.error, LeaseLostError)
    assert other.number == 2
    assert all(".2/" not in path for _, path in faults.requests)


@pytest.mark.usefixtures("store")
def test_a_second_run_is_refused_while_the_first_renews_its_lease_and_takes_over_when_it_is_dead(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started():
        monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "another-host"))
        with pytest.raises(ConfigError, match=r"run.dir.*\n.*another process is writing there"):
            _taken(URL, silent_s=SILENT_S)
        monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "another-host"))
    capsys.readouterr()
    assert _taken(URL, silent_s=SILENT_S).number == 2  # it was given back
    assert "counts as ended" not in capsys.readouterr().err
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "third-host"))
    began = time.monotonic()
    assert _taken(URL, silent_s=SILENT_S).number == 3  # it was not: its process is gone
    assert time.monotonic() - began >= SILENT_S
    assert "it counts as ended after 3 s" in capsys.readouterr().err


@pytest.mark.usefixtures("store")
def test_a_store_that_does_not_allow_what_a_run_needs_is_refused_before_it_begins(faults: Faulty) -> None:
    for methods, words in {
        "DELETE": "do not allow writing and deleting there",
        "PUT DELETE POST": "do not allow writing and deleting there",  # read-only credentials
        "PUT": "cannot be written",
        "GET": "cannot be listed",
    }.items():
        faults.forbidden = methods
        with pytest.raises(StorageError, match=f"{words}: PermissionError"):
            _taken(URL, silent_s=SILENT_S)
        faults.forbidden = ""
        assert objects_below(URL) == {}  # no probe is left
    faults.forbidden, faults.overwrites = "", True
    with pytest.raises(DataError, match="If-None-Match"):
        _taken(URL, silent_s=SILENT_S)
    assert newest_lease(URL) is None


@pytest.mark.usefixtures("store")
def test_what_counts_is_the_store_but_on_the_host_that_has_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started() as run:
        (run.run_dir / "metrics.jsonl").write_text("first\n")
        checkpoint(run.run_dir, 1)
    checkpoint(run.run_dir, 2)  # never uploaded
    (run.run_dir / "metrics.jsonl").write_text("first\nsecond\n")
    assert (pull(URL) / "metrics.jsonl").read_text() == "first\nsecond\n"
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "another-host"))
    assert (local_run(URL) / "metrics.jsonl").read_text() == "first\n"
    assert local_run(f"{URL}/checkpoints/latest").name == "step-00000001"
    with started() as other:
        checkpoint(other.run_dir, 2, content=b"other")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    assert (pull(URL) / "metrics.jsonl").read_text() == "first\n"
    assert sorted(path.name for path in (run.run_dir / "checkpoints").glob("step-*")) == ["step-00000001"]
    assert local_run(f"{URL}/checkpoints/step-00000002.2").is_dir()


def test_a_run_whose_objects_were_deleted_does_not_come_back_from_a_cache(store: Any) -> None:
    with started() as run:
        checkpoint(run.run_dir, 1)
    store.rm("store/runs/a", recursive=True)
    with pytest.raises(DataError, match="the store has nothing of this run any more"):
        pull(URL)
    with pytest.raises(DataError, match="no run has begun there"):
        local_run("s3://store/runs/b")
