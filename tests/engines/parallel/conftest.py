"""Fixture: a group of gloo processes for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.parallel.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes per module, not per session: every gloo group that was ever created keeps a busy thread."""
    world = Ranks(str(tmp_path_factory.mktemp("ranks")))
    yield world
    world.close()
