"""A world of gloo processes for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes. For all files the same ones would do, but every gloo group ever made keeps a busy thread."""
    world = Ranks(str(tmp_path_factory.mktemp("ranks")))
    yield world
    world.close()
