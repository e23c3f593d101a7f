"""Opens the executor that the command line names: local, ray or spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_prep.executors.base import Executor, default_workers
from data_prep.executors.local import LocalExecutor
from foundation.errors import ConfigError


@contextmanager
def open_executor(name: str, *, root: Path, workers: int | None, address: str | None) -> Iterator[Executor]:
    """Yields an executor: local, ray or spark. (slurm is not an executor: it submits the phases, see `job.slurm`.)

    Args:
        root: the job directory.
        workers: number of concurrent tasks; None: the number of CPUs.
        address: address of a Ray cluster or a Spark master; None: the engine's own default.

    Raises:
        ConfigError: the engine is not installed or cannot be reached.
    """
    if name == "ray":
        from data_prep.executors.on_ray import open_ray  # noqa: PLC0415

        with open_ray(root, workers=workers, address=address) as ray:
            yield ray
    elif name == "spark":
        from data_prep.executors.on_spark import open_spark  # noqa: PLC0415

        with open_spark(root, workers=workers, address=address) as spark:
            yield spark
    elif address is not None:
        raise ConfigError(
            "--address", address, why=f"--executor {name} takes no address", remedy="--executor ray or spark"
        )
    else:
        with LocalExecutor(workers or default_workers()) as local:
            yield local
