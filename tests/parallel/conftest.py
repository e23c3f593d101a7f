"""One world of gloo processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes."""
    world = Ranks(str(tmp_path_factory.mktemp("ranks")))
    yield world
    world.close()
