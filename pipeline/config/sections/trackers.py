"""Schema of trackers that DeepSpeed does not have: MLflow, and a text file for Prometheus."""

from __future__ import annotations

from pydantic import Field

from foundation.paths import LocalPath
from foundation.section import Section


class MlflowSection(Section):
    """MLflow: metrics, config and the run's status on a tracking server. Needs the package mlflow."""

    enabled: bool = Field(False, description="true: log the run to an MLflow tracking server")
    tracking_uri: str | None = Field(
        None,
        description="The tracking server, e.g. http://127.0.0.1:5000, or a database, e.g. sqlite:///mlflow.db;"
        " MLFLOW_TRACKING_URI when absent. Logins are MLflow's own: MLFLOW_TRACKING_TOKEN and others",
    )
    experiment: str = Field("headrace", description="MLflow experiment, e.g. llama-1b, which is made if it is missing")


class PrometheusSection(Section):
    """A text file with the newest numbers of the run, for the textfile collector of Prometheus' node exporter."""

    path: LocalPath | None = Field(
        None,
        description="File to write, e.g. /var/lib/node_exporter/headrace.prom, in the folder of the node exporter's"
        " --collector.textfile.directory; none when absent",
    )
