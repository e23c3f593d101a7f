"""Inputs behind a URL: an S3 server on this machine, spoken to over HTTP, gives the bytes that local files give."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep.tokenfile import open_split
from headrace.directory import read_manifest

pytest.importorskip("moto.server", reason="needs moto and flask, an S3 server for tests")
s3fs = pytest.importorskip("s3fs", reason="needs s3fs")

from moto.server import ThreadedMotoServer  # noqa: E402

Tree = dict[str, bytes]


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """An empty bucket `corpus` on a server of its own; what boto needs is in the environment."""
    server = ThreadedMotoServer(port=0)
    server.start()
    _, port = server.get_host_and_port()
    known = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in known.items():
            patch.setenv(key, value)
        files = s3fs.S3FileSystem()
        files.mkdir("corpus")
        yield files
    server.stop()


def shards(tokens: Path) -> list[bytes]:
    """Every shard's bytes, of both splits."""
    prefixes = [prefix for split in ("train", "heldout") for prefix in open_split(tokens, split=split)[0]]
    return [prefix.with_name(prefix.name + suffix).read_bytes() for prefix in prefixes for suffix in (".bin", ".idx")]


def test_a_corpus_in_a_bucket_gives_the_shards_of_the_same_files_on_disk(
    s3: Any, finished: Path, cli: Any, write_config: Callable[..., str]
) -> None:
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
    told = read_manifest(finished / "remote", kind="tokens").details["splits"]
    local = read_manifest(finished / "tokens", kind="tokens").details["splits"]
    assert {split: entry["documents"] for split, entry in told.items()} == {
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


@pytest.mark.usefixtures("s3", "work")
def test_what_is_not_there_is_refused_before_any_work(cli: Any, write_config: Callable[..., str], work: Path) -> None:
    config = write_config(sources=[{"path": "s3://corpus/nothing/*.jsonl"}])
    assert "there is no such file" in cli("--config", config, code=2).stderr
    config = write_config(sources=[{"path": "s3://no-such-bucket/x.jsonl"}])
    assert "s3://no-such-bucket/x.jsonl" in cli("--config", config, code=2).stderr
    config = write_config(sources=[{"path": "sx3://corpus/x.jsonl"}])
    assert "sx3" in cli("--config", config, code=2).stderr
    assert sorted(path.name for path in work.iterdir()) == ["corpus.json"]


def test_an_object_that_is_replaced_while_it_is_read_is_refused(
    s3: Any, work: Path, write_config: Callable[..., str]
) -> None:
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
    said = job.communicate()[1]
    assert job.returncode == 2, said
    assert "changed" in said
    assert not (work / "tokens").exists()


def _tokenizer(work: Path) -> Path:
    from data_prep.config import TokenizerSection  # noqa: PLC0415
    from data_prep.tokenizer.train import train  # noqa: PLC0415

    folder = work / "made"
    folder.mkdir()
    train(["la riviere turns the wheel of the mill"] * 50, folder, TokenizerSection(train="bpe", vocab_size=300))
    return folder
