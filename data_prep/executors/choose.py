"""Which executor a command line asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_prep.executors.base import Executor, default_workers
from data_prep.executors.local import Local
from headrace.base.errors import ConfigError


@contextmanager
def executor(name: str, *, root: Path, workers: int | None, address: str | None) -> Iterator[Executor]:
    """Gives an executor: local, ray or spark. (slurm runs no tasks of its own, see `on_slurm`.)

    Args:
        root: the job directory.
        workers: how many tasks at once; None: as many as there is room for.
        address: of a Ray cluster or a Spark master; None: what the engine finds by itself.

    Raises:
        ConfigError: the engine is not installed or cannot be reached.
    """
    if name == "ray":
        from data_prep.executors.on_ray import on_ray  # noqa: PLC0415

        with on_ray(root, workers=workers, address=address) as ray:
            yield ray
    elif name == "spark":
        from data_prep.executors.on_spark import on_spark  # noqa: PLC0415

        with on_spark(root, workers=workers, address=address) as spark:
            yield spark
    elif address is not None:
        raise ConfigError("--address", address, why=f"--executor {name} has none", remedy="--executor ray or spark")
    else:
        with Local(workers or default_workers()) as local:
            yield local
