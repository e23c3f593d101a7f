"""Training on tokens in an object store: the samples, boundaries and losses of local files, on a real S3 server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.directory import read_manifest
from headrace.base.errors import ConfigError, DataError
from headrace.base.remote_directory import CACHE, publish
from headrace.base.section import parse
from headrace.base.storage import StorageError
from pipeline.config.batch import BatchSizes
from pipeline.config.rules.data import check_data
from pipeline.config.sections.data import DataSection
from pipeline.data.loader import StepLoader
from pipeline.data.mixture import DataMixture, open_heldout, open_mixture
from tests.conftest import launch, losses, tiny_config, write_config
from tests.object_store import Application, s3_server

T, URL = 32, "s3://store/tokens/demo"


class Slow:
    """A store that answers late, and counts the requests that it answers at a time."""

    def __init__(self) -> None:
        self.seconds, self.most, self._now, self._lock = 0.0, 0, 0, threading.Lock()
        self.asked: list[tuple[str, str]] = []

    def between(self, app: Application) -> Application:
        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            with self._lock:
                self._now += 1
                self.most = max(self.most, self._now)
                self.asked.append((environ["PATH_INFO"], environ.get("HTTP_RANGE", "")))
            time.sleep(self.seconds)
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
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    spans = [each for each in slow.asked if each[0].endswith(".bin")]
    assert len(spans) == len(set(spans)) == 20 * 3
    assert slow.most > 8, "the spans of a group of steps are asked for together"


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
    with pytest.raises(DataError, match="there is no object of that prefix"):
        mixture_of("s3://store/tokens/other")
    store.pipe_file(f"{URL}/{name}", whole)
    with pytest.raises(ConfigError, match=r"data\.packing"):
        mixture_of(URL, packing="best_fit")


def test_a_url_is_not_staged_but_copied_by_name() -> None:
    about = {"sources": [{"path": f"{URL}/"}], "sequence_length": T, "stage_to": "/local/headrace"}
    with pytest.raises(ConfigError, match=rf"(?s)data\.stage_to.*headrace copy {URL} /local"):
        check_data(parse(DataSection, about))


def test_an_object_that_goes_away_while_it_is_read_ends_the_loader_with_its_name(store: Any, tokens: Path) -> None:
    remote = mixture_of(URL)
    for name in read_manifest(tokens, kind="tokens").files:
        if name.endswith(".bin"):
            store.rm_file(f"{URL}/{name}")
    with pytest.raises(StorageError, match=rf"{URL}/train/shard-\d+\.bin cannot be read"):
        batches(remote, steps=2)


@pytest.mark.usefixtures("store")
def test_a_run_on_a_url_has_the_losses_of_local_files_and_names_the_url(tokens: Path, tmp_path: Path) -> None:
    for name, path in (("local", str(tokens)), ("remote", URL)):
        config = tiny_config(tokens, tmp_path / name, engine="torch")
        config["data"]["sources"] = [{"path": path}]
        launch("train.py", write_config(tmp_path / f"{name}.json", config), "run.steps=4", "scheduler=auto")
    assert losses(tmp_path / "remote") == losses(tmp_path / "local")
    assert read_manifest(tmp_path / "remote", kind="run").parents["data.sources.0"]["path"] == URL
