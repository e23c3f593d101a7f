"""Imports without the garbage collector, which is as before afterwards."""

from __future__ import annotations

import contextlib
import gc

import pytest

from foundation.quick_imports import quick_imports


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_off_in_the_block_and_as_before_after_it(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with contextlib.suppress(ImportError), quick_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()
