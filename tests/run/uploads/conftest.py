"""A bucket for runs, with faults between, and a cache of this host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foundation.remote_directory import CACHE
from tests.object_store import Faulty, s3_server


@pytest.fixture
def faults() -> Faulty:
    return Faulty()


@pytest.fixture
def store(tmp_path: Path, faults: Faulty, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore would ask again for most of a minute
    with s3_server("store", between=faults.between) as files:
        try:
            yield files
        finally:
            faults.rate, faults.down, faults.forbidden = 0.0, False, ""
