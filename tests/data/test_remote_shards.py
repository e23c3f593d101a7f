"""Training on tokens in an object store: the samples, boundaries and losses of local files, on a real S3 server."""

from __future__ import annotations

import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.packing.pack import pack
from foundation.directory import read_manifest
from foundation.errors import ConfigError, DataError
from foundation.remote_directory import CACHE
from foundation.remote_publish import publish
from foundation.section import parse
from foundation.storage import StorageError
from pipeline.config.batch import BatchSizes
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.data import DataSection
from pipeline.config.sections.run import Config
from pipeline.data.loader import StepLoader
from pipeline.data.mixture import DataMixture, open_heldout, open_mixture
from pipeline.data.read_ahead import ReadAhead
from pipeline.data.span_cache import SpanCache
from pipeline.run.staged_data import open_cache, staged_data
from tests.conftest import launch, losses, tiny_config, write_config
from tests.data.test_staging import small_disk
from tests.object_store import Application, s3_server
from tests.support import wait_until

T, URL = 32, "s3://store/tokens/demo"


class Slow:
    """A store that answers late or not at all, and counts the requests that it answers at a time."""

    def __init__(self) -> None:
        self.seconds, self.most, self._now, self._lock = 0.0, 0, 0, threading.Lock()
        self.asked: list[tuple[str, str, str]] = []
        self.down = False

    def between(self, app: Application) -> Application:
        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            with self._lock:
                self._now += 1
                self.most = max(self.most, self._now)
                self.asked.append((environ["PATH_INFO"], environ.get("HTTP_RANGE", ""), environ["REQUEST_METHOD"]))
            time.sleep(self.seconds)
            if self.down:
                start_response("503 Slow Down", [("Content-Type", "application/xml")])
                return [b"<Error><Code>SlowDown</Code><Message>reduce your request rate</Message></Error>"]
            try:
                return app(environ, start_response)
            finally:
                with self._lock:
                    self._now -= 1

        return answer


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def store(slow: Slow, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket with the tokens under `URL`."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    with s3_server("store", between=slow.between) as files:
        publish(tokens, URL)
        yield files


def mixture_of(path: str, **fields: Any) -> DataMixture:
    section = parse(DataSection, {"sources": [{"path": path}], "sequence_length": T, **fields})
    return open_mixture(section, seed=1)


def batches(mixture: DataMixture, *, steps: int, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Inputs, labels and documents of a rank's steps."""
    batch = BatchSizes(samples=6, micro=3, accumulation=1, dp=2, sequence_length=T)
    loader = StepLoader(mixture, batch, dp_rank=1, steps=(1, steps), prefetch=2, **options)
    micros = [micro for step in loader for micro in step.micro_batches]
    return [{key: each for key, each in vars(micro).items() if isinstance(each, torch.Tensor)} for micro in micros]


def same(expected: list[dict[str, torch.Tensor]], found: list[dict[str, torch.Tensor]]) -> None:
    """Compares batches."""
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("masked", [False, True])
def test_samples_and_documents_are_those_of_local_files_and_each_span_is_read_once(
    tokens: Path, slow: Slow, masked: bool
) -> None:
    expected = batches(mixture_of(str(tokens)), steps=20, mask_documents=masked)
    remote = mixture_of(URL)
    slow.asked.clear()
    slow.seconds = 0.02
    found = batches(remote, steps=20, mask_documents=masked)
    same(expected, found)
    spans = [each for each in slow.asked if each[0].endswith(".bin")]
    assert len(spans) == len(set(spans)) == 20 * 3
    assert slow.most > 8, "the spans of a group of steps are asked for together"


@pytest.mark.integration
@pytest.mark.usefixtures("store")
def test_heldout_text_is_read_from_the_store(tokens: Path) -> None:
    sections = [parse(DataSection, {"sources": [{"path": path}], "sequence_length": T}) for path in (str(tokens), URL)]
    local, remote = (open_heldout(each, open_mixture(each, seed=1))[0] for each in sections)
    assert np.array_equal(local.read(np.arange(local.windows)), remote.read(np.arange(remote.windows)))
    assert remote.label == f"{URL}/heldout"


def test_what_is_not_as_the_manifest_says_is_refused_before_work(store: Any, tokens: Path) -> None:
    name = next(each for each in read_manifest(tokens, kind="tokens").files if each.endswith(".bin"))
    whole = store.cat_file(f"{URL}/{name}")
    store.pipe_file(f"{URL}/{name}", whole[:-2])
    with pytest.raises(DataError, match=rf"{name} has {len(whole) - 2} bytes"):
        mixture_of(URL)
    store.rm_file(f"{URL}/{name}")
    with pytest.raises(DataError, match=rf"{name} is missing"):
        mixture_of(URL)
    with pytest.raises(DataError, match="no object has this prefix"):
        mixture_of("s3://store/tokens/other")


@pytest.mark.usefixtures("store")
def test_a_packing_beside_the_tokens_is_read_from_the_store(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"headrace copy TOKENS/packed-{T} {URL}/packed-{T}"):
        mixture_of(URL, packing="best_fit")
    local = tmp_path / "tokens"
    shutil.copytree(tokens, local)
    pack(local, length=T)
    publish(local / f"packed-{T}", f"{URL}/packed-{T}")
    expected = batches(mixture_of(str(local), packing="best_fit"), steps=5, mask_documents=True)
    remote = mixture_of(URL, packing="best_fit")
    same(expected, batches(remote, steps=5, mask_documents=True))
    assert remote.parents["data.sources.0.packing"]["path"] == f"{URL}/packed-{T}"


@pytest.mark.usefixtures("store")
def test_a_directory_of_several_sources_is_listed_and_its_manifest_read_once(tokens: Path, slow: Slow) -> None:
    names = {
        str(shard["source"]) for shard in read_manifest(tokens, kind="tokens").details["splits"]["train"]["shards"]
    }
    slow.asked.clear()
    sources = [{"path": URL, "source": name} for name in sorted(names)]
    section = parse(DataSection, {"sources": sources, "sequence_length": T})
    open_heldout(section, open_mixture(section, seed=1))
    read = [path for path, _, method in slow.asked if method == "GET"]
    assert len([path for path in read if path in ("/store", "/store/")]) == 1
    assert read.count("/store/tokens/demo/manifest.json") == 1


@pytest.mark.usefixtures("store")
def test_staging_copies_from_the_store_and_compares_checksums(tokens: Path, tmp_path: Path, store: Any) -> None:
    mixture, to = mixture_of(URL, stage_to=str(tmp_path / "local")), tmp_path / "local"
    data = parse(DataSection, {"sources": [{"path": URL}], "sequence_length": T, "stage_to": str(to)})
    said: list[str] = []
    expected = batches(mixture_of(str(tokens)), steps=5, mask_documents=True)
    with staged_data(data, mixture, (), say=said.append, progress=lambda: None):
        manifest = read_manifest(to / f"demo-{mixture.sources[0].manifest.fingerprint[:16]}", kind="tokens")
        assert manifest.fingerprint == read_manifest(tokens, kind="tokens").fingerprint
        assert URL in said[0]
        store.rm(URL, recursive=True)
        same(expected, batches(mixture, steps=5, mask_documents=True))


@pytest.fixture
def caches() -> Iterator[list[DataMixture]]:
    """Mixtures whose processes are ended."""
    opened: list[DataMixture] = []
    yield opened
    for mixture in opened:
        assert mixture.remote.ahead is not None
        mixture.remote.ahead.close()


def through_cache(caches: list[DataMixture], folder: Path, *, limit: int, **fields: Any) -> DataMixture:
    mixture = mixture_of(URL, **fields)
    mixture.remote.ahead = ReadAhead(SpanCache(folder, limit=limit), "order")
    caches.append(mixture)
    return mixture


def spans_of(slow: Slow) -> list[tuple[str, str, str]]:
    return [each for each in slow.asked if each[0].endswith((".bin", ".idx"))]


@pytest.mark.integration
@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("masked", [False, True])
def test_samples_through_the_cache_are_those_of_local_files_and_it_stays_within_its_limit(
    tokens: Path, slow: Slow, tmp_path: Path, caches: list[DataMixture], masked: bool
) -> None:
    expected = batches(mixture_of(str(tokens)), steps=100, mask_documents=masked)
    limit = 15_000  # of 100 steps of 200 bytes
    remote, folder = through_cache(caches, tmp_path / "spans", limit=limit), tmp_path / "spans"
    slow.asked.clear()
    found, most = [], 0
    batch = BatchSizes(samples=6, micro=3, accumulation=1, dp=2, sequence_length=T)
    for step in StepLoader(remote, batch, dp_rank=1, steps=(1, 100), prefetch=2, mask_documents=masked):
        found += [
            {key: each for key, each in vars(micro).items() if isinstance(each, torch.Tensor)}
            for micro in step.micro_batches
        ]
        most = max(most, sum(path.stat().st_size for path in folder.iterdir() if path.is_file()))
    same(expected, found)
    spans = [each for each in spans_of(slow) if each[0].endswith(".bin")]
    assert len(spans) == len(set(spans)), "each span is read once"
    assert 2_000 < most <= limit


@pytest.mark.integration
@pytest.mark.usefixtures("store")
def test_ranks_of_a_host_and_the_next_start_read_what_one_has_read(
    slow: Slow, tmp_path: Path, caches: list[DataMixture]
) -> None:
    ranks = [through_cache(caches, tmp_path / "spans", limit=1 << 20) for _ in range(3)]
    slow.asked.clear()
    slow.seconds = 0.02
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda mixture: batches(mixture, steps=64), ranks[:2])
    same(one, other)
    count = len(spans_of(slow))
    assert count == len(set(spans_of(slow))) == 64 * 3
    same(one, batches(ranks[2], steps=64))
    assert len(spans_of(slow)) == count


@pytest.mark.integration
@pytest.mark.usefixtures("store")
def test_a_store_that_fails_for_a_while_stops_no_step_whose_data_is_on_this_host(
    tokens: Path, slow: Slow, tmp_path: Path, caches: list[DataMixture]
) -> None:
    remote = through_cache(caches, tmp_path / "spans", limit=1 << 20)
    batch = BatchSizes(samples=6, micro=3, accumulation=1, dp=2, sequence_length=T)
    steps = iter(StepLoader(remote, batch, dp_rank=0, steps=(1, 128), prefetch=2))
    next(steps)
    assert remote.remote.ahead is not None
    cache = remote.remote.ahead.cache
    wait_until(lambda: cache.used >= 128 * 3 * 66)
    slow.down = True
    found = [step.micro_batches[0].input_ids for step in steps]
    local = StepLoader(mixture_of(str(tokens)), batch, dp_rank=0, steps=(2, 128))
    assert all(torch.equal(one, step.micro_batches[0].input_ids) for one, step in zip(found, local, strict=True))
    slow.down = False


@pytest.mark.integration
@pytest.mark.usefixtures("store")
def test_without_its_process_or_room_spans_are_read_directly(
    tokens: Path, tmp_path: Path, caches: list[DataMixture], capfd: pytest.CaptureFixture[str]
) -> None:
    expected = batches(mixture_of(str(tokens)), steps=40)
    killed = through_cache(caches, tmp_path / "spans", limit=1 << 20)
    batch = BatchSizes(samples=6, micro=3, accumulation=1, dp=2, sequence_length=T)
    found = []
    for step in StepLoader(killed, batch, dp_rank=1, steps=(1, 40), prefetch=2):
        if step.step == 1:
            assert killed.remote.ahead is not None
            assert killed.remote.ahead._process is not None
            killed.remote.ahead._process.kill()
        found += [{"input_ids": micro.input_ids, "labels": micro.labels} for micro in step.micro_batches]
    same(expected, found)
    same(expected, batches(through_cache(caches, tmp_path / "no-room", limit=100), steps=40))
    full = tmp_path / "full"
    with small_disk(full, kilobytes=16):
        mixture = through_cache(caches, full, limit=1 << 20)
        same(expected, batches(mixture, steps=40))
        assert mixture.remote.ahead is not None
        mixture.remote.ahead.close()
    warning = rf"{full}, the cache for tokens in object stores: No space left on device; from now on 0\.000 GB"
    assert re.search(warning, capfd.readouterr().err)


def test_an_object_that_goes_away_while_it_is_read_ends_the_loader_with_its_name(store: Any, tokens: Path) -> None:
    remote = mixture_of(URL)
    for name in read_manifest(tokens, kind="tokens").files:
        if name.endswith(".bin"):
            store.rm_file(f"{URL}/{name}")
    with pytest.raises(StorageError, match=rf"{URL}/train/shard-\d+\.bin cannot be read"):
        batches(remote, steps=2)


@pytest.mark.usefixtures("store")
def test_a_cache_that_is_too_small_for_a_step_or_too_large_for_the_disk_is_refused(
    tokens: Path, tmp_path: Path
) -> None:
    def opened(**fields: Any) -> SpanCache:
        config = tiny_config(tokens, tmp_path / "run", engine="torch")
        config["data"] |= {"sources": [{"path": URL}], **fields}
        run = resolve(parse(Config, config), world_size=1)
        mixture = open_mixture(run.config.data, seed=1)
        open_cache(run, mixture)
        assert mixture.remote.ahead is not None
        return mixture.remote.ahead.cache

    assert 10_000_000 < opened().limit <= 32e9
    cache = opened(cache_to=str(tmp_path / "disk"), cache_gb=0.5, mask_documents=True)
    assert cache.folder == tmp_path / "disk/spans" / socket.gethostname()
    indexes = [entry["bytes"] for name, entry in read_manifest(tokens, kind="tokens").files.items() if ".idx" in name]
    assert 500_000_000 - sum(indexes) <= cache.limit < 500_000_000
    with pytest.raises(ConfigError, match=r"(?s)data\.cache_gb.*a step needs 0\.00.*--set data\.cache_gb=0\.00\d"):
        opened(cache_gb=1e-6)
    with pytest.raises(ConfigError, match=r"(?s)data\.cache_gb.*GB are free in .*data\.cache_to"):
        opened(cache_gb=1e9)


@pytest.mark.usefixtures("store")
def test_a_run_on_a_url_has_the_losses_of_local_files_and_names_the_url(tokens: Path, tmp_path: Path) -> None:
    for name, path in (("local", str(tokens)), ("remote", URL)):
        config = tiny_config(tokens, tmp_path / name, engine="torch")
        config["data"]["sources"] = [{"path": path}]
        launch("train.py", write_config(tmp_path / f"{name}.json", config), "run.steps=4", "scheduler=auto")
    assert losses(tmp_path / "remote") == losses(tmp_path / "local")
    cache = SpanCache(tmp_path / "cache/spans" / socket.gethostname(), limit=0)
    assert cache.used > 4 * 33 * 2, "the training samples went through the cache"
    assert read_manifest(tmp_path / "remote", kind="run").parents["data.sources.0"]["path"] == URL
