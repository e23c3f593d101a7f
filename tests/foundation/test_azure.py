"""`az://` on Azurite: conditional writes, lists, ranges, whole directories, samples of tokens in a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundation.directory import read_manifest, verify
from foundation.errors import DataError
from foundation.remote_directory import CACHE, fetch
from foundation.remote_publish import check_can_write, publish
from foundation.storage import (
    StorageError,
    delete,
    download,
    objects_below,
    put_if_absent,
    put_object,
    read_object,
    read_range,
    read_ranges,
    upload,
)
from pipeline.data.dataset import TokenDataset
from tests.object_store import azure_server

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
