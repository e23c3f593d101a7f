"""MLflow sink, when the config enables it: an MLflow run through MLflow's own client.

A run begins with its config as parameters and as a JSON artifact. Rows become metrics under grouped names
(`tags.py`). At the end the manifest of the run's directory is an artifact, and the MLflow run is FINISHED, KILLED
(asked to stop: the next start goes on) or FAILED. A resumed run continues the same MLflow run by its id, which is in
the run's directory. MLflow keeps what was logged: steps that a resume or a rollback repeats have two values there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from pipeline.config.sections.trackers import MlflowSection
from pipeline.runtime.metrics.sinks import OneWarning
from pipeline.runtime.metrics.tags import tagged

_ID = ".mlflow-id"
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""The client's own settings, where the user has none: training must not wait minutes for a server that is gone."""
_PAUSE_S = 60.0
"""Seconds after a failure before the server is tried again."""
_EVERY_S = 1.0
"""Shortest time between two requests; rows between them are sent together."""
_BATCH, _KEPT, _PARAMETERS = 1000, 100_000, 100
"""Metrics of one request, metrics that wait for the server at most, and parameters of one request."""
_LONGEST = 500
"""Characters of a parameter's value; older servers refuse longer values."""


def check_mlflow(section: MlflowSection) -> None:
    """Refuses a config that enables MLflow where the package, or the server's address, is missing.

    Raises:
        ConfigError: the package or the address is missing; the error says how to get it.
    """
    if not section.enabled:
        return
    if find_spec("mlflow") is None:
        remedy = "pip install mlflow (or mlflow-skinny, the client alone), or set mlflow.enabled to false"
        raise ConfigError("mlflow.enabled", True, why="the package mlflow is not installed", remedy=remedy)
    if section.tracking_uri is None and "MLFLOW_TRACKING_URI" not in os.environ:
        remedy = "set mlflow.tracking_uri, e.g. to http://127.0.0.1:5000, or the variable MLFLOW_TRACKING_URI"
        raise ConfigError("mlflow.tracking_uri", why="it names no tracking server", remedy=remedy)


class MlflowSink:
    """Logs rows to MLflow. A failure gives one warning, and training continues; rows wait until the server is back.

    Args:
        section: the config's `mlflow`.
        run_dir: the run's directory; its name is the name of the MLflow run.
        config: config of the run.
        steps: length of the run, by which its end is told from a stop.
    """

    def __init__(self, section: MlflowSection, run_dir: Path, *, config: dict[str, Any], steps: int) -> None:
        check_mlflow(section)
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient  # noqa: PLC0415  takes seconds, only if enabled

        self._client, self._section = MlflowClient(tracking_uri=section.tracking_uri), section
        self._run_dir, self._config, self._steps, self._step = run_dir, config, steps, 0
        self._waiting: list[Any] = []
        self._sent, self._again = 0.0, 0.0
        self._guarded = OneWarning("MLflow cannot be reached, and gets its rows once it is back")
        self._id: str | None = None
        self._try(self._begin)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Logs the numbers of a row at its step; events are not logged."""
        if kind == "event":
            return
        from mlflow.entities import Metric  # noqa: PLC0415

        now = int(time.time() * 1000)
        numbers = tagged(kind, values).items()
        self._waiting += [Metric(_name(tag), float(value), now, step) for tag, value in numbers]
        del self._waiting[:-_KEPT]
        self._step = max(self._step, step) if kind == "step" else self._step
        if time.monotonic() >= max(self._again, self._sent + (_EVERY_S if kind == "step" else 0.0)):
            self._try(self._send)

    def end(self, *, failed: bool) -> None:
        """Sends the rows that wait and the manifest, and sets the MLflow run's status."""
        self._try(self._send)
        self._try(lambda: self._finish("FAILED" if failed else "FINISHED" if self._step >= self._steps else "KILLED"))

    def _begin(self) -> None:
        from mlflow.exceptions import MlflowException  # noqa: PLC0415

        path = self._run_dir / _ID
        if path.exists():
            try:
                self._client.update_run(path.read_text(), status="RUNNING")
                self._id = path.read_text()
                return
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        run = self._client.create_run(self._experiment(), run_name=self._run_dir.name)
        path.write_text(run.info.run_id)
        self._id = run.info.run_id
        self._describe()

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._section.experiment)
        name = self._section.experiment
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _describe(self) -> None:
        from mlflow.entities import Param  # noqa: PLC0415

        params = [Param(_name(key.replace("/", ".")), str(value)[:_LONGEST]) for key, value in _flat(self._config)]
        for start in range(0, len(params), _PARAMETERS):
            self._client.log_batch(self._id, params=params[start : start + _PARAMETERS])
        self._client.log_dict(self._id, self._config, "config.json")

    def _send(self) -> None:
        if self._id is None:  # the server could not be reached at the start
            self._begin()
        self._sent = time.monotonic()
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:_BATCH])
            del self._waiting[:_BATCH]

    def _finish(self, status: str) -> None:
        if (manifest := self._run_dir / "manifest.json").is_file():
            self._client.log_artifact(self._id, str(manifest))
        self._client.set_terminated(self._id, status)

    def _try(self, action: Callable[[], None]) -> None:
        if not self._guarded(action):
            self._again = time.monotonic() + _PAUSE_S


def _name(tag: str) -> str:
    """Replaces characters that MLflow refuses in names."""
    return "".join(each if each.isalnum() or each in "_-./ :" else "_" for each in tag)


def _flat(config: Mapping[str, Any], at: str = "") -> list[tuple[str, Any]]:
    """Lists the values of a config by dotted key; those that are null are left out."""
    rows: list[tuple[str, Any]] = []
    for key, value in config.items():
        path = f"{at}.{key}" if at else key
        rows += _flat(value, path) if isinstance(value, Mapping) else [(path, value)] if value is not None else []
    return rows
