"""What test modules on a virtual cluster share: their marks, and one cluster for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.virtual_cluster.cluster import VirtualCluster, missing_requirements

NEEDS_SLURM = [
    pytest.mark.slurm,
    pytest.mark.skipif(missing_requirements() is not None, reason=str(missing_requirements())),
]
"""The `pytestmark` of a module: its tests are skipped where a cluster cannot be started."""


def module_cluster(**size: int) -> Any:
    """A fixture `cluster`, to be assigned to that name in a module; `size`: nodes, cpus and gpus of a node."""

    @pytest.fixture(scope="module", name="cluster")
    def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualCluster]:
        with VirtualCluster(tmp_path_factory.mktemp("cluster"), **size) as running:
            yield running

    return made
