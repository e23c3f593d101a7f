"""Outputs and folders that are URLs: made on this host and uploaded, copied and read, on a real S3 server (moto)."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foundation.command_line import Parser, execute
from foundation.directory import MANIFEST, commit, staged
from foundation.errors import ConfigError, DataError
from foundation.lock import LockedError
from foundation.paths import OUTPUT
from foundation.remote_directory import CACHE, fetch
from foundation.remote_folder import _copied, local_folder
from foundation.remote_output import check_output, local_output, published, upload_finished, upload_left
from foundation.remote_publish import publish
from foundation.storage import StorageError, objects_below
from headrace.commands.app import run
from tests.conftest import ROOT
from tests.object_store import s3_server
from tests.support import kill, wait_until
from tests.warm_python import python

URL = "s3://outputs/models/a"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    _copied.cache_clear()
    with s3_server("outputs") as files:
        yield files
    _copied.cache_clear()


def make(final: Path, *, kind: str = "model", size: int = 1000) -> None:
    """What a stage does: a directory of three files, one in a folder."""
    with staged(final) as staging:
        (staging / "sub").mkdir()
        for number, name in enumerate(("a", "b", "sub/c")):
            (staging / name).write_bytes(bytes([number]) * size)
        commit(staging, final, kind=kind, config={})


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def places(tmp_path: Path) -> list[str]:
    """What is left on this host of outputs."""
    return [path.name for path in (tmp_path / "cache/outputs").rglob("*") if not path.name.endswith(".lock")]


def test_an_output_in_a_store_has_the_bytes_of_one_on_a_disk_and_leaves_nothing_here(
    store: Any, tmp_path: Path
) -> None:
    make(tmp_path / "local")
    check_output(URL)
    store.pipe_file(f"{URL}/.headrace-probe-0123456789ab", b"1")  # of a process that was killed there
    with published(URL) as final:
        assert final.name == "a"
        make(final)
    fetch(URL, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "local")
    assert objects_below(URL).keys() == contents(tmp_path / "local").keys()
    assert places(tmp_path) == []


@pytest.mark.usefixtures("store")
def test_an_output_that_is_taken_is_refused_before_work(tmp_path: Path) -> None:
    with published(URL) as final:
        make(final)
    with pytest.raises(DataError, match="exists already"):
        check_output(URL)
    make(tmp_path / "local")
    with pytest.raises(ConfigError, match="it already exists"):
        check_output(str(tmp_path / "local"))


@pytest.mark.usefixtures("store")
def test_an_output_for_which_the_disk_has_no_room_is_refused_before_work() -> None:
    with pytest.raises(DataError, match="HEADRACE_CACHE"):
        check_output(URL, needed=1 << 60)
    assert objects_below(URL) == {}


@pytest.mark.usefixtures("store")
def test_two_processes_of_a_host_do_not_write_one_output() -> None:
    with published(URL), pytest.raises(LockedError, match="another process is writing"), published(URL):
        pass


@pytest.mark.usefixtures("store")
def test_a_stage_that_fails_leaves_nothing_in_the_store(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), published(URL) as final, staged(final):
        raise ZeroDivisionError
    assert objects_below(URL) == {}
    assert places(tmp_path) == []


@pytest.mark.parametrize("by", ["its remedy", "the same stage", "making it again"])
def test_a_killed_upload_leaves_nothing_finished_and_the_next_start_finishes_it(
    store: Any, tmp_path: Path, by: str
) -> None:
    code = (
        "import sys, time; from pathlib import Path; import foundation.remote_publish as r;"
        " from foundation.directory import commit, staged; from foundation.remote_output import published\n"
        "write = r.upload\n"
        "r.upload = lambda *a, **k: (write(*a, **k), time.sleep(60))\n"
        "with published(sys.argv[1]) as final, staged(final) as s:\n"
        "    (s / 'sub').mkdir()\n"
        "    for n, name in enumerate(('a', 'b', 'sub/c')): (s / name).write_bytes(bytes([n]) * 1000)\n"
        "    commit(s, final, kind='model', config={})\n"
    )
    process = subprocess.Popen([python(), "-c", code, URL], cwd=ROOT)
    wait_until(lambda: len(objects_below(URL)) >= 2)
    kill(process)
    assert not store.exists(f"{URL}/{MANIFEST}")
    check_output(URL)
    with pytest.raises(DataError, match=r"of another config .*\n  try: headrace copy .* or rm -r ") as refused:
        upload_left(URL, config={"seed": 1}, parents={})
    remedy = str(refused.value).split("try: headrace ")[1].split(", or ")[0]
    if by == "its remedy":
        assert run(remedy.split()) == 0
        with pytest.raises(DataError, match="exists already"):
            check_output(URL)
    elif by == "the same stage":
        assert upload_left(URL, config={}, parents={}) is not None
    else:
        with published(URL) as final:
            make(final)
    assert places(tmp_path) == []
    assert upload_left(URL, config={}, parents={}) is None
    make(tmp_path / "local")
    fetch(URL, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "local")


@pytest.mark.usefixtures("store")
def test_what_a_stage_that_resumes_has_finished_is_uploaded_by_one_of_its_processes(tmp_path: Path) -> None:
    make(local_output(URL), kind="logits")
    upload_finished(URL)
    upload_finished(URL)
    assert MANIFEST in objects_below(URL)
    assert places(tmp_path) == []


@pytest.mark.usefixtures("store")
def test_a_folder_that_headrace_wrote_is_copied_once_and_compared(tmp_path: Path) -> None:
    make(tmp_path / "local")
    publish(tmp_path / "local", URL)
    assert contents(local_folder(URL)) == contents(tmp_path / "local")
    _copied.cache_clear()
    assert local_folder(URL) == local_folder(f"{URL}/")
    assert local_folder(tmp_path / "local") == tmp_path / "local"


def test_a_plain_folder_is_copied_by_its_sizes_and_again_when_it_was_changed(store: Any) -> None:
    for name, data in {"config.json": b"{}", "model.safetensors": b"x" * 99, "original/big.pth": b"y"}.items():
        store.pipe_file(f"{URL}/{name}", data)
    first = local_folder(URL)
    assert contents(first) == {"config.json": b"{}", "model.safetensors": b"x" * 99}
    store.pipe_file(f"{URL}/model.safetensors", b"z" * 99)
    _copied.cache_clear()
    assert contents(local_folder(URL))["model.safetensors"] == b"z" * 99


@pytest.mark.usefixtures("store")
def test_what_is_no_folder_is_refused_with_what_works(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no object has this prefix"):
        local_folder(URL)
    make(tmp_path / "tokens", kind="tokens")
    publish(tmp_path / "tokens", URL)
    with pytest.raises(DataError, match=f"headrace copy {URL} DIR"):
        local_folder(URL)


def verb(out: str, *more: str) -> int:
    """A command line whose verb writes a finished directory OUT and a page OUT.html."""

    def declare(parser: Parser) -> None:
        parser.add_argument("out", metavar="OUT", type=OUTPUT.as_path())
        parser.add_argument("--page", metavar="OUT.html", type=OUTPUT.as_path())
        parser.set_defaults(_run=work)

    def work(arguments: argparse.Namespace) -> None:
        make(arguments.out)
        if arguments.page:
            arguments.page.write_text("page")

    return execute([out, *more], prog="verb", declare=declare)


def test_the_command_line_uploads_the_outputs_of_a_verb(
    store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "s3://outputs/page.html"
    assert verb(str(tmp_path / "local")) == 0
    assert verb(URL, "--page", page) == 0
    assert f"uploaded to {URL}, {page}" in capsys.readouterr().out
    fetch(URL, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "local")
    assert store.cat_file(page) == b"page"
    assert verb(URL) == 2
    assert f"{URL} exists already" in capsys.readouterr().err
    assert places(tmp_path) == []


def test_an_output_that_cannot_be_written_is_refused_before_work(
    store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.pipe_file(f"{URL}/{MANIFEST}", b"{}")
    assert verb(URL) == 2
    assert "is damaged" in capsys.readouterr().err
    with pytest.raises(StorageError):
        check_output("s3://no-such-bucket/a")
    assert not (tmp_path / "cache/outputs").exists()
