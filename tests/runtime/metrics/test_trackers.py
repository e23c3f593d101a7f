"""Trackers beside W&B and TensorBoard: MLflow on a real server, Prometheus' text file, tags, a user's own tracker."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from foundation.errors import ConfigError
from foundation.section import parse
from foundation.user_function import load_function
from pipeline.config.sections.deepspeed import TensorBoardSection
from pipeline.config.sections.trackers import MlflowSection
from pipeline.runtime.metrics import mlflow_sink
from pipeline.runtime.metrics.mlflow_sink import MlflowSink, check_mlflow
from pipeline.runtime.metrics.prometheus_file import METRICS, PrometheusFile
from pipeline.runtime.metrics.tags import OVERVIEW, tagged
from pipeline.runtime.metrics.tensorboard_sink import TensorBoardSink
from pipeline.runtime.metrics.user_sink import UserSink
from tests.warm import ROOT

CONFIG = {"model": {"config": {"hidden_size": 48}}, "run": {"dir": "runs/a", "steps": 3, "seed": None}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real MLflow tracking server, with a database and artifacts of its own."""
    if find_spec("mlflow") is None or find_spec("sqlalchemy") is None or find_spec("uvicorn") is None:
        pytest.skip("MLflow's server is not installed: pip install mlflow-skinny sqlalchemy alembic")
    work = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{work}/m.db", "--artifacts-destination", str(work / "artifacts")]
    with (work / "log").open("w") as log:
        given: dict[str, Any] = {"env": os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}, "cwd": work}
        process = subprocess.Popen([*command, *store], stdout=log, stderr=log, start_new_session=True, **given)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            time.sleep(0.5)
            try:
                urlopen(f"{url}/health", timeout=2)
                break
            except OSError:
                assert process.poll() is None, (work / "log").read_text()
        yield url
    finally:
        subprocess.run(["kill", "--", f"-{process.pid}"], check=False)
        process.wait()


def mlflow_sink_of(url: str, run_dir: Path) -> MlflowSink:
    run_dir.mkdir(exist_ok=True)
    section = parse(MlflowSection, {"enabled": True, "tracking_uri": url, "experiment": "tests"})
    return MlflowSink(section, run_dir, config=CONFIG, steps=3)


@pytest.mark.integration
def test_mlflow_has_one_run_with_config_rows_and_manifest_after_a_stop_and_a_resume(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient  # noqa: PLC0415

    monkeypatch.setattr(mlflow_sink, "_EVERY_S", 0.2)
    client, run_dir = MlflowClient(tracking_uri=server), tmp_path / "a"
    sink = mlflow_sink_of(server, run_dir)
    for step in (1, 2):
        sink.write("step", step, loss=3.0 - step, lr=0.1, tokens_per_second=10.0, memory_allocated_bytes=7)
    sink.end(failed=False)
    number = (run_dir / ".mlflow-id").read_text()
    assert client.get_run(number).info.status == "KILLED"
    (run_dir / "manifest.json").write_text("{}")
    resumed = mlflow_sink_of(server, run_dir)
    assert client.get_run(number).info.status == "RUNNING"
    resumed.write("step", 3, loss=0.5)
    resumed.write("eval", 3, loss=0.7, sources={"web": 0.6, "code (a+b)": 0.8})
    resumed.end(failed=False)
    run = client.get_run(number)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "a")
    assert [(each.step, each.value) for each in client.get_metric_history(number, "loss/train")] == [
        (1, 2.0),
        (2, 1.0),
        (3, 0.5),
    ]
    assert run.data.metrics["loss/held_out/web"] == pytest.approx(0.6)
    assert run.data.metrics["loss/held_out/code _a_b_"] == pytest.approx(0.8)
    assert run.data.metrics["memory/allocated_bytes"] == 7
    assert run.data.params == {"model.config.hidden_size": "48", "run.dir": "runs/a", "run.steps": "3"}
    assert {each.path for each in client.list_artifacts(number)} == {"config.json", "manifest.json"}
    failed = mlflow_sink_of(server, tmp_path / "b")
    failed.end(failed=True)
    assert client.get_run((tmp_path / "b/.mlflow-id").read_text()).info.status == "FAILED"
    client.delete_run(number)
    again = mlflow_sink_of(server, run_dir)  # its run was deleted there
    again.write("step", 3, loss=0.1)
    again.end(failed=False)
    assert client.get_run((run_dir / ".mlflow-id").read_text()).info.status == "FINISHED"


@pytest.mark.skipif(find_spec("mlflow") is None, reason="MLflow is not installed: pip install mlflow-skinny")
def test_training_continues_without_the_mlflow_server_and_is_not_delayed_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    sink = mlflow_sink_of("http://127.0.0.1:9", tmp_path / "a")
    began = time.monotonic()
    for step in range(1, 200):
        sink.write("step", step, loss=1.0)
    assert time.monotonic() - began < 5
    sink.end(failed=False)
    assert capsys.readouterr().err.count("warning: MLflow cannot be reached") == 1


def test_a_missing_package_and_a_missing_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(mlflow_sink, "find_spec", lambda _name: None)
    enabled = parse(MlflowSection, {"enabled": True})
    check_mlflow(parse(MlflowSection, {}))
    with pytest.raises(ConfigError, match="pip install mlflow"):
        check_mlflow(enabled)
    monkeypatch.setattr(mlflow_sink, "find_spec", lambda _name: True)
    with pytest.raises(ConfigError, match="it names no tracking server"):
        check_mlflow(enabled)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    check_mlflow(enabled)


def gauges(path: Path) -> dict[str, float]:
    """Reads the file as Prometheus does: each sample follows its HELP and TYPE."""
    lines, found = path.read_text().splitlines(), {}
    for about, kind, sample in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, labels, value = re.fullmatch(r'(\w+)\{run="((?:[^"\\]|\\.)*)"\} (\S+)', sample).groups()
        assert about.startswith(f"# HELP {name} ")
        assert kind == f"# TYPE {name} gauge"
        assert labels
        found[name] = float(value)
    return found


def test_the_file_for_prometheus_has_the_newest_numbers_and_says_when_the_run_has_ended(tmp_path: Path) -> None:
    path, before = tmp_path / "h.prom", time.time()
    sink = PrometheusFile(path, tmp_path / 'a "run"', steps=9)
    sink.write("event", 0, event="started")
    sink.write("step", 1, loss=2.0, tokens=64, tokens_per_second=5.0)
    sink.write("step", 2, loss=float("nan"), tokens=128, tokens_per_second=6.0)
    sink.write("eval", 2, loss=1.5)
    assert "headrace_loss" not in gauges(path)  # five seconds have not passed
    sink.write("event", 2, event="checkpoint")
    found = gauges(path)
    assert found["headrace_loss"] != found["headrace_loss"]  # NaN, as Prometheus spells it
    assert (found["headrace_step"], found["headrace_steps"], found["headrace_tokens"]) == (2, 9, 128)
    assert (found["headrace_held_out_loss"], found["headrace_running"]) == (1.5, 1)
    assert before <= found["headrace_heartbeat_timestamp_seconds"] <= time.time()
    sink.close()
    assert gauges(path)["headrace_running"] == 0


def test_the_alert_rules_use_gauges_that_the_file_has() -> None:
    (group,) = yaml.safe_load((ROOT / "examples/prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        names = set(re.findall(r"headrace_(\w+)", rule["expr"]))
        assert "running" in names <= set(METRICS), rule["alert"]


def test_files_that_cannot_be_written_are_a_warning_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = parse(TensorBoardSection, {"enabled": True, "output_path": "/proc"})
    prometheus = PrometheusFile(tmp_path / "missing/h.prom", tmp_path, steps=1)
    for sink in (prometheus, TensorBoardSink(section, run_dir=str(tmp_path))):
        for step in (1, 2):
            sink.write("event", step, event="started")
        sink.close()
        assert capsys.readouterr().err.count("cannot be written") == 1


def test_tags_group_the_rows() -> None:
    step = {"loss": 1, "kl": 2, "lr": 3, "mfu": 4, "memory_resident_bytes": 5, "tokens": 6, "expert_max_violation": 7}
    assert tagged("step", {**step, "stage": "long"}) == {
        "loss/train": 1,
        "loss/kl": 2,
        "optimizer/lr": 3,
        "speed/mfu": 4,
        "memory/resident_bytes": 5,
        "data/tokens": 6,
        "moe/expert_max_violation": 7,
    }
    held_out = {"loss": 1, "perplexity": 2, "sources": {"web": 3}}
    assert tagged("eval", held_out) == {"loss/held_out": 1, "eval/perplexity": 2, "loss/held_out/web": 3}
    assert tagged("task/arc", {"accuracy": 1}) == {"task/arc/accuracy": 1}
    known = {*tagged("step", dict.fromkeys([*step, "grad_norm", "tokens_per_second"], 0)), *tagged("eval", held_out)}
    for plot, (_, patterns) in OVERVIEW["Overview"].items():
        assert any(re.search(pattern, tag) for pattern in patterns for tag in known), plot


def test_a_users_tracker_gets_rows_and_a_failure_of_it_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_tracker.py").write_text(TRACKER)
    sinks = [made(name, tmp_path) for name in ("Rows", "Broken")]
    for sink in sinks:
        for step in (1, 2):
            sink.write("step", step, loss=1.0)
        sink.close()
    assert (tmp_path / "rows").read_text() == "48 step 1 1.0\n48 step 2 1.0\n"
    assert capsys.readouterr().err.count("the tracker own_tracker:Broken failed") == 1
    for name, why in {"open_none": "has no method write", "open_failing": "ZeroDivisionError"}.items():
        with pytest.raises(ConfigError, match=why):
            made(name, tmp_path)


TRACKER = """
class Rows:
    def __init__(self, run_dir, config):
        self.file, self.size = (run_dir / "rows").open("w"), config["model"]["config"]["hidden_size"]
    def write(self, kind, step, **values):
        print(self.size, kind, step, values["loss"], file=self.file)
    def close(self):
        self.file.close()
class Broken:
    def __init__(self, run_dir, config):
        pass
    def write(self, kind, step, **values):
        raise OSError("no")
open_none = lambda run_dir, config: None
open_failing = lambda run_dir, config: 1 / 0
"""


def made(name: str, run_dir: Path) -> Any:
    function = load_function(f"own_tracker:{name}", field="sinks.0")
    return UserSink(function, run_dir, config=CONFIG, field="sinks.0")
