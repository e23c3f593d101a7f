"""Remote inputs: files read over HTTP from local S3, GCS and Hub servers give the same shards as local files."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from data_prep.formats.tokenfile import open_split
from foundation.directory import read_manifest
from tests.data_prep.conftest import cli_of_its_own, write_config
from tests.object_store import environment, s3_server
from tests.support import respond, respond_json

COMMIT = "0" * 40
_API, _FILES = "/api/datasets/headrace/corpus", "/datasets/headrace/corpus/resolve/"


@contextmanager
def serve_hub(folder: Path) -> Iterator[str]:
    """Serves a folder as the dataset `headrace/corpus` of a fake Hub: the part of its HTTP API that the client uses."""

    class Handler(_Handler):
        root = folder

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith(_FILES):
            self._file(path.removeprefix(_FILES).partition("/")[2])
        elif path.startswith(f"{_API}/tree/"):
            self._tree(path.removeprefix(f"{_API}/tree/").partition("/")[2])
        elif path in (_API, f"{_API}/revision/main", f"{_API}/revision/{COMMIT}"):
            respond_json(
                self, 200, {"id": "headrace/corpus", "sha": COMMIT, "private": False, "tags": [], "siblings": []}
            )
        else:
            self._missing()

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if not self.path.startswith(f"{_API}/paths-info/"):
            return self._missing()
        names = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        return respond_json(self, 200, [self._entry(self.root / name) for name in names if (self.root / name).exists()])

    def log_message(self, *_: Any) -> None:
        """Suppresses the access log."""

    def _tree(self, name: str) -> None:
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        folder = self.root / name
        if not folder.is_dir():
            return self._missing()
        return respond_json(
            self, 200, [self._entry(path) for path in sorted(folder.rglob("*") if recursive else folder.iterdir())]
        )

    def _entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.root).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": _oid(name.encode()), "size": 0, "path": name}
        return {"type": "file", "oid": _oid(path.read_bytes()), "size": path.stat().st_size, "path": name}

    def _file(self, name: str) -> None:
        if not (self.root / name).is_file():
            return self._missing()
        content = (self.root / name).read_bytes()
        first, last = 0, len(content) - 1
        if byte_range := self.headers.get("Range"):
            low, _, high = byte_range.removeprefix("bytes=").partition("-")
            first, last = int(low), min(int(high), last) if high else last
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if byte_range:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return respond(self, 206 if byte_range else 200, content[first : last + 1], headers)

    def _missing(self) -> None:
        respond(self, 404, b'{"error": "EntryNotFound"}', {"X-Error-Code": "EntryNotFound"})


def _oid(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def cli(work: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """See `cli_of_its_own`; in `work`."""
    assert Path.cwd() == work
    return cli_of_its_own


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """An empty bucket `s3://corpus` on a local server; boto's settings are in the environment."""
    with s3_server("corpus") as files:
        yield files


@pytest.fixture(scope="module")
def gs() -> Iterator[Any]:
    """An empty bucket `gs://corpus` on a local server; gcsfs's settings are in the environment."""
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="needs gcp-storage-emulator")
    port = free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="corpus")
    server.start()
    variables = {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "FSSPEC_GS_TOKEN": "anon",
        "FSSPEC_GCS_TOKEN": "anon",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else it queries the bucket type over TLS
    }
    with environment(variables):  # gcsfs reads it at import
        yield pytest.importorskip("gcsfs", reason="needs gcsfs").GCSFileSystem()
    server.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shards(tokens: Path) -> list[bytes]:
    prefixes = [prefix for split in ("train", "heldout") for prefix in open_split(tokens, split=split)[0]]
    return [prefix.with_name(prefix.name + suffix).read_bytes() for prefix in prefixes for suffix in (".bin", ".idx")]


def shards_from(
    root: str, work: Path, cli: Any, write_config: Callable[..., str], *, texts: str = "texts"
) -> list[bytes]:
    """The shards made from a part of `mixed_corpus` under `root`."""
    paths = {"texts": f"{root}/{texts}", "rows": f"{root}/rows.parquet", "lines": f"{root}/*.jsonl.gz"}
    output = f"from-{'local' if root == '.' else 'remote'}"
    sources = [{"name": name, "path": path} for name, path in paths.items()]
    cli("--config", write_config(sources=sources, output=output))
    return shards(work / output)


def test_a_corpus_in_an_s3_bucket_gives_the_shards_of_local_files(s3: Any, finished: Path, cli: Any) -> None:
    names = ["plain.jsonl", "packed.jsonl.gz", "rows.parquet"]
    for name in names:
        s3.put(str(finished / name), f"corpus/{name}")
    s3.pipe("corpus/.hidden/x.jsonl", b"not json")
    s3.put(str(finished / "texts"), "corpus/texts", recursive=True)
    config = write_config(
        "remote.json",
        sources=[
            {"path": "s3://corpus/texts", "name": "texts"},
            {"path": ["s3://corpus/plain.jsonl", "s3://corpus/*.jsonl.gz"], "name": "lines"},
            {"path": "s3://corpus/rows.parquet", "name": "rows"},
        ],
        output="remote",
        task_bytes=1500,
        shard_tokens=1 << 20,
    )
    cli("--config", config)
    remote = read_manifest(finished / "remote", kind="tokens").details["splits"]
    local = read_manifest(finished / "tokens", kind="tokens").details["splits"]
    assert {split: entry["documents"] for split, entry in remote.items()} == {
        split: entry["documents"] for split, entry in local.items()
    }
    write_config(
        "local.json",
        sources=[{"path": "texts", "name": "texts"}, {"path": "rows.parquet", "name": "rows"}],
        output="local",
        shard_tokens=1 << 20,
    )
    cli("--config", "local.json")
    cli("--config", "local.json", "--set", "output=again", "--set", "sources.0.path=s3://corpus/texts")
    assert shards(finished / "local") == shards(finished / "again")


def test_a_corpus_in_a_google_bucket_gives_the_shards_of_local_files(gs: Any, finished: Path, cli: Any) -> None:
    gs.put(str(finished / "texts"), "corpus/texts", recursive=True)
    gs.put(str(finished / "rows.parquet"), "corpus/rows.parquet")
    gs.put(str(finished / "packed.jsonl.gz"), "corpus/packed.jsonl.gz")
    assert shards_from("gs://corpus", finished, cli, write_config) == shards_from(".", finished, cli, write_config)


def test_a_corpus_on_the_hub_gives_the_shards_of_local_files(
    finished: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with serve_hub(finished) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        place = "hf://datasets/headrace/corpus"
        remote, local = (shards_from(root, finished, cli, write_config, texts="texts/3.md") for root in (place, "."))
        assert remote == local

        config = write_config(sources=[{"path": f"{place}/*.jsonl.gz"}, {"path": f"{place}/texts/3.md"}], output="late")
        cli("prepare", "--config", config)
        one = finished / "texts" / "3.md"
        one.write_bytes(one.read_bytes().replace(b"mill", b"loom"))
        error = cli("--config", config, code=2).stderr
        assert "3.md has changed since the job was planned" in error


@pytest.mark.usefixtures("s3", "work")
def test_a_missing_remote_input_is_refused_before_any_work(cli: Any, work: Path) -> None:
    config = write_config(sources=[{"path": "s3://corpus/nothing/*.jsonl"}])
    assert "there is no such file" in cli("--config", config, code=2).stderr
    config = write_config(sources=[{"path": "s3://no-such-bucket/x.jsonl"}])
    assert "s3://no-such-bucket/x.jsonl" in cli("--config", config, code=2).stderr
    config = write_config(sources=[{"path": "sx3://corpus/x.jsonl"}])
    assert "sx3" in cli("--config", config, code=2).stderr
    assert sorted(path.name for path in work.iterdir()) == ["corpus.json"]


def test_an_object_that_is_replaced_while_it_is_read_is_refused(s3: Any, work: Path) -> None:
    lines = b"".join(b'{"text": "%d la riviere turns the wheel of the mill"}\n' % i for i in range(300_000))
    s3.pipe("corpus/large.jsonl", lines)
    config = write_config(sources=[{"path": "s3://corpus/large.jsonl"}], tokenizer={"path": str(_tokenizer(work))})
    job = subprocess.Popen(
        [sys.executable, "-m", "data_prep", "--config", config, "--workers", "1"],
        cwd=work,
        env=dict(os.environ),
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(work.glob(".tokens.job/map/.*.partial")):
        assert job.poll() is None, job.communicate()
        time.sleep(0.01)
    s3.pipe("corpus/large.jsonl", lines.replace(b"mill", b"loom"))
    error = job.communicate()[1]
    assert job.returncode == 2, error
    assert "changed" in error
    assert not (work / "tokens").exists()


def _tokenizer(work: Path) -> Path:
    from data_prep.config.corpus import TokenizerSection  # noqa: PLC0415
    from data_prep.tokenizer.train import train  # noqa: PLC0415

    folder = work / "made"
    folder.mkdir()
    train(["la riviere turns the wheel of the mill"] * 50, folder, TokenizerSection(train="bpe", vocab_size=300))
    return folder
