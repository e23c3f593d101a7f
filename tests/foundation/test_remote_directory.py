"""Directories in an object store: whole or absent, whoever is killed, on servers of S3 (moto) and Azure."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from foundation import run_copy
from foundation.directory import MANIFEST, commit, fresh_staging, read_manifest, verify, write_manifest
from foundation.errors import DataError
from foundation.lease import LeaseLostError, newest_lease, take_lease
from foundation.remote_directory import CACHE, fetch
from foundation.remote_output import local_output, published
from foundation.remote_publish import check_can_publish, check_can_write, publish
from foundation.remote_run import remote_checkpoints
from foundation.run_copy import publish_run
from foundation.storage import (
    StorageError,
    delete,
    download,
    objects_below,
    patiently,
    put_if_absent,
    put_object,
    read_object,
    read_range,
    read_ranges,
    upload,
)
from headrace.commands.app import run
from pipeline.data.dataset import TokenDataset
from tests.conftest import ROOT
from tests.object_store import Application, azure_server, environment, s3_server
from tests.support import kill, wait_until
from tests.warm_python import python

FILES = 12
URL = "s3://store/models/a"


class Faults:
    """What happens to the requests between a client and the server.

    Attributes:
        refused: writes that are still answered with 503, a store's "slow down".
        overwrites: conditions of writes are lost on the way.
        lost: end of the path of writes that the server takes and forgets.
    """

    def __init__(self) -> None:
        self.refused, self.overwrites, self.lost = 0, False, "none"

    def between(self, app: Application) -> Application:
        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            if self.overwrites:
                environ.pop("HTTP_IF_NONE_MATCH", None)
            if environ["REQUEST_METHOD"] == "PUT" and self.refused:
                self.refused -= 1
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response("503 Slow Down", [("Content-Type", "application/xml")])
                return [b"<Error><Code>SlowDown</Code><Message>reduce your request rate</Message></Error>"]
            if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith(self.lost):
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response("200 OK", [("ETag", '"0"')])
                return [b""]
            return app(environ, start_response)

        return answer


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def store(faults: Faults) -> Iterator[Any]:
    with s3_server("store", between=faults.between) as files:
        yield files


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A finished directory of some files, one of them below a folder and one empty."""
    final = tmp_path / "made"
    staging = fresh_staging(final)
    (staging / "train").mkdir()
    for number in range(FILES):
        (staging / f"train/shard-{number:05d}.bin").write_bytes(bytes([number]) * 100_000 * (number > 0))
    commit(staging, final, kind="tokens", config={"a": 1}, details={"splits": {}})
    return final


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("store")
def test_a_directory_comes_back_from_a_store_byte_for_byte(directory: Path, tmp_path: Path) -> None:
    done: list[int] = []
    publish(directory, URL, progress=done.append)
    assert sum(done) == sum(len(data) for name, data in contents(directory).items() if name != MANIFEST)
    fetch(f"{URL}/", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(directory)
    assert read_manifest(tmp_path / "back", kind="tokens") == read_manifest(directory, kind="tokens")


def test_files_that_the_manifest_does_not_list_come_back_too_and_inner_directories_with_checksums(
    store: Any, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "README.md").write_text("a card")
    (directory / ".lock").touch()
    (directory / "page").mkdir()
    (directory / "page" / MANIFEST).write_text('{"name": "of another program"}')
    staging = fresh_staging(inner := directory / "packed-9")
    (staging / "index").write_bytes(b"12")
    commit(staging, inner, kind="packed", config={})
    assert run(["copy", str(directory), URL]) == run(["copy", URL, str(tmp_path / "back")]) == 0
    assert capsys.readouterr().out.count(f"tokens, {FILES + 4} files, 0.001 GB, 4 of them not in its {MANIFEST}") == 2
    (directory / ".lock").unlink()
    assert contents(tmp_path / "back") == contents(directory)
    store.pipe_file(f"{URL}/packed-9/index", b"21")
    assert run(["copy", URL, str(tmp_path / "again")]) == 2
    assert "index has another checksum" in capsys.readouterr().err


@pytest.mark.usefixtures("store")
def test_nothing_here_is_deleted_where_the_store_has_lost_a_file(
    faults: Faults, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    faults.lost = "shard-00003.bin"
    lost = pytest.raises(DataError, match=r"shard-00003.bin was sent with 100,000 bytes, and is not there")
    with lost, published(URL) as final:
        shutil.copytree(directory, final)
    assert MANIFEST not in objects_below(URL)
    assert contents(local_output(URL)) == contents(directory)
    faults.lost = "page.html"
    with pytest.raises(StorageError), published(f"{URL}/page.html") as page:
        page.write_text("page")
    assert local_output(f"{URL}/page.html").read_text() == "page"


@pytest.mark.usefixtures("store")
def test_a_run_is_not_mixed_with_checkpoints_of_another_that_a_killed_copy_has_left(tmp_path: Path) -> None:
    for name in ("one", "other"):
        run_dir = tmp_path / name
        staging = fresh_staging(final := run_dir / "checkpoints/step-00000003")
        (staging / "weights").write_text(name)
        commit(staging, final, kind="checkpoint", config={})
        write_manifest(run_dir, kind="run", config={})
    publish(tmp_path / "one/checkpoints/step-00000003", f"{URL}/checkpoints/step-00000003.1")
    with pytest.raises(DataError, match=r"step-00000003.1 is not a checkpoint of .*/other"):
        publish_run(tmp_path / "other", URL)
    assert publish_run(tmp_path / "one", URL) == {"checkpoints/step-00000003/weights": 3}
    with pytest.raises(DataError, match="exists already"):
        publish_run(tmp_path / "other", URL)  # a run has been written there since `check_can_publish`
    assert [each.step for each in remote_checkpoints(URL)] == [3]
    lease = newest_lease(URL)
    assert lease is not None
    assert lease.released


def test_a_run_on_a_file_system_without_locks_is_copied_from_a_copy_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(DataError, match=r"may train there\n  try: .* cp -r, and run this command on the copy"):
        publish_run(tmp_path, URL)


@pytest.mark.usefixtures("store")
def test_a_copy_that_loses_its_lease_writes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = fresh_staging(final := tmp_path / "checkpoints/step-00000003")
    (staging / "weights").write_text("one")
    commit(staging, final, kind="checkpoint", config={})
    write_manifest(tmp_path, kind="run", config={})
    monkeypatch.setattr(run_copy, "SILENT_S", 0.3)

    def lose(_bytes: int) -> None:
        take_lease(URL, newest_lease(URL), token="another", silent_s=60)
        time.sleep(1.0)

    with pytest.raises(LeaseLostError, match="another process has taken it over"):
        publish_run(tmp_path, URL, progress=lose)
    assert {name for name in objects_below(URL) if name.endswith(MANIFEST)} == set()


@pytest.mark.usefixtures("store")
def test_what_is_there_already_is_refused_before_work_and_of_two_writers_one_succeeds(directory: Path) -> None:
    check_can_publish(URL)
    publish(directory, URL)
    with pytest.raises(DataError, match="exists already"):
        check_can_publish(URL)
    with pytest.raises(DataError, match="another process has written"):
        publish(directory, URL)
    assert set(objects_below(URL)) == set(contents(directory))  # the probe is gone


@pytest.mark.usefixtures("store")
def test_a_store_that_overwrites_in_spite_of_the_condition_is_refused_before_work(faults: Faults) -> None:
    faults.overwrites = True
    with pytest.raises(DataError, match="If-None-Match"):
        check_can_publish(URL)
    assert objects_below(URL) == {}


@pytest.mark.usefixtures("store")
def test_a_store_that_asks_to_slow_down_is_asked_again(faults: Faults, directory: Path, tmp_path: Path) -> None:
    faults.refused = 5
    publish(directory, URL)
    assert faults.refused == 0
    fetch(URL, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(directory)


def test_an_endpoint_that_is_dead_is_told_without_a_minute_of_patience() -> None:
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    with environment({"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_MAX_ATTEMPTS": "1", **keys}):
        s3fs.S3FileSystem.clear_instance_cache()
        tries = itertools.count()
        with pytest.raises(StorageError, match="EndpointConnectionError"):
            patiently(lambda: (next(tries), objects_below(URL)))
        s3fs.S3FileSystem.clear_instance_cache()
    assert next(tries) == 2


def test_a_killed_upload_leaves_nothing_that_looks_finished_and_the_next_one_is_whole(
    store: Any, directory: Path, tmp_path: Path
) -> None:
    code = (
        "import sys, time; from pathlib import Path; from foundation.remote_publish import publish\n"
        "calls = []\n"
        "def stop_after_some(size):\n    calls.append(size)\n    len(calls) < 4 or time.sleep(1000)\n"
        "publish(Path(sys.argv[1]), sys.argv[2], progress=stop_after_some)"
    )
    process = subprocess.Popen([python(), "-c", code, str(directory), URL], cwd=ROOT)
    wait_until(lambda: len(objects_below(URL)) >= 3)
    kill(process)
    assert not store.exists(f"{URL}/{MANIFEST}")
    with pytest.raises(DataError, match=rf"no finished directory: there are \d+ objects and no {MANIFEST}"):
        fetch(URL, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    check_can_publish(URL)
    publish(directory, URL)
    fetch(URL, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(directory)


def test_a_damaged_or_missing_object_is_named_and_leaves_no_copy(store: Any, directory: Path, tmp_path: Path) -> None:
    publish(directory, URL)
    name = "train/shard-00003.bin"
    store.pipe_file(f"{URL}/{name}", b"x" * 100_000)
    with pytest.raises(DataError, match=rf"{name} has another checksum"):
        fetch(URL, tmp_path / "back")
    store.rm_file(f"{URL}/{name}")
    with pytest.raises(StorageError, match=rf"{name} cannot be read"):
        fetch(URL, tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_the_verb_copies_both_ways_and_says_what_is_wrong(
    store: Any, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def copy(*arguments: str, code: int = 0) -> str:
        found, printed = run(["copy", *arguments]), capsys.readouterr()
        assert found == code, printed
        return printed.out + printed.err

    assert f"tokens, {FILES} files, 0.001 GB" in copy(str(directory), URL)
    assert str(tmp_path / "back") in copy(URL, str(tmp_path / "back"))
    assert contents(tmp_path / "back") == contents(directory)
    assert "exists already" in copy(str(directory), URL, code=2)
    assert "neither is in an object store" in copy(str(directory), str(tmp_path / "b"), code=2)
    assert "no object has this prefix" in copy("s3://store/nothing", str(tmp_path / "b"), code=2)
    assert "s3://no-such-bucket/a" in copy(str(directory), "s3://no-such-bucket/a", code=2)
    assert "was not finished" in copy(str(tmp_path), "s3://store/b", code=2)
    manifest = json.loads(store.cat_file(f"{URL}/{MANIFEST}"))
    store.pipe_file(f"{URL}/{MANIFEST}", json.dumps(manifest | {"kind": "model"}).encode())
    assert "checksum is not the one it was written with" in copy(URL, str(tmp_path / "b"), code=2)


PLACE = "az://store/a"


@pytest.fixture(scope="module")
def container() -> Iterator[Any]:
    with azure_server("store") as files:
        yield files


@pytest.mark.usefixtures("container")
def test_objects_are_written_once_listed_read_in_ranges_and_deleted() -> None:
    check_can_write(PLACE)
    assert [put_if_absent(f"{PLACE}/once", each) for each in (b"1", b"2", b"1")] == [True, False, True]
    put_object(f"{PLACE}/b/c", b"0123456789")
    put_object(f"{PLACE}/b/c", b"abcdefghijk")
    assert read_object(f"{PLACE}/b/c") == b"abcdefghijk"
    assert read_range(f"{PLACE}/b/c", 9, 10) == b"jk"
    assert read_ranges([(f"{PLACE}/b/c", 0, 2), (f"{PLACE}/once", 0, 1), (f"{PLACE}/b/c", 3, 4)]) == [
        b"ab",
        b"1",
        b"defg",
    ]
    found = objects_below(PLACE)
    assert {name: stat.bytes for name, stat in found.items()} == {"once": 1, "b/c": 11}
    before = found["b/c"]
    put_object(f"{PLACE}/b/c", b"ABCDEFGHIJK")
    assert objects_below(PLACE)["b/c"].differs_from(before)
    for name in ("b/c", "b/c", "once"):
        delete(f"{PLACE}/{name}")
    assert objects_below(PLACE) == {}
    with pytest.raises(FileNotFoundError):
        read_object(f"{PLACE}/once")
    with pytest.raises(StorageError, match=f"{PLACE}/once cannot be read") as missing:
        read_ranges([(f"{PLACE}/once", 0, 1)])
    assert missing.value.lasting


@pytest.mark.usefixtures("container")
def test_large_files_are_sent_in_blocks_which_are_counted(tmp_path: Path) -> None:
    path, sent = tmp_path / "large", list[int]()
    path.write_bytes(np.random.default_rng(0).bytes(66 << 20))  # adlfs sends smaller ones in one request
    upload(path, "az://store/large", progress=sent.append)
    assert sum(sent) == 66 << 20
    download("az://store/large", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()


@pytest.mark.usefixtures("container")
def test_a_directory_is_published_once_and_fetched_whole_and_its_samples_are_read_in_place(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    publish(tokens, "az://store/tokens")
    with pytest.raises(DataError, match="another process has written a directory there"):
        publish(tokens, "az://store/tokens")
    fetch("az://store/tokens", tmp_path / "copy")
    assert all(right for _, right in verify(tmp_path / "copy", read_manifest(tokens, kind="tokens")))
    local, remote = (
        TokenDataset.open(path, split="train", sequence_length=32) for path in (tokens, "az://store/tokens")
    )
    assert np.array_equal(local.read(np.arange(50)), remote.read(np.arange(50)))
