"""A job whose output is a URL: the bytes of a local one, uploaded at its end, on a real S3 server (moto)."""

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

from headrace.base.directory import MANIFEST, read_manifest
from headrace.base.errors import DataError
from headrace.base.remote_directory import CACHE, fetch
from headrace.base.remote_output import local_output
from headrace.base.storage import objects_below
from tests.data_prep.conftest import cli, text_folder, tree, write_config
from tests.data_prep.in_process import run_job
from tests.object_store import s3_server

URL = "s3://corpora/web/tokens"


@pytest.fixture
def store(work: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(CACHE, str(work / "cache"))
    with s3_server("corpora") as files:
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


def test_a_job_that_was_killed_before_its_upload_is_uploaded_by_the_next_start(
    store: Any, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_folder(work)
    config = write_config(output=URL)
    with monkeypatch.context() as patch:
        patch.setattr("data_prep.job.finish.upload_finished", lambda _output: None)
        run_job(config)
    assert local_output(URL).is_dir()
    assert not store.exists(f"{URL}/{MANIFEST}")
    run_job(config)
    assert store.exists(f"{URL}/{MANIFEST}")
    assert left(work) == []


@pytest.mark.usefixtures("store")
def test_shares_of_several_hosts_need_a_directory_that_all_share(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text_folder(work)
    config = write_config(output=URL)
    monkeypatch.delenv(CACHE)
    done = cli("share", "--config", config, "--task", "0", "--of", "1", code=2)
    assert f"export {CACHE}=/shared/DIRECTORY on all hosts" in done.stderr
    monkeypatch.setenv(CACHE, str(work / "cache"))
    done = cli("share", "--config", config, "--task", "0", "--of", "1")
    assert f"output: {URL}, fingerprint" in done.stdout
    assert "is finished" in cli("status", "--config", config).stdout


@pytest.mark.integration
def test_a_job_that_is_killed_three_times_equals_an_undisturbed_one(
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
    subprocess.run(command, cwd=work, check=True)
    fetch(URL, work / "back")
    assert tree(work / "back") == tree(finished_work / "tokens")
    assert set(objects_below(URL)) == set(tree(work / "back"))
    assert left(work) == []
