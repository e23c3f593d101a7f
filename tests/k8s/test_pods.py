"""The container's command in pods that the Trainer would start; pods end, and the run has the losses of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import warm_python
from tests.conftest import launch, losses, tiny_config, write_config
from tests.k8s.manifests import need_kubectl
from tests.k8s.pods import Pods, command_of_manifest
from tests.virtual_cluster.cluster import missing_requirements

NAMESPACES = missing_requirements()
pytestmark = [pytest.mark.integration, pytest.mark.skipif(NAMESPACES is not None, reason=str(NAMESPACES))]
STEPS, EVERY = 30, 5


@pytest.fixture(scope="module", autouse=True)
def _kubectl() -> None:
    need_kubectl()


@pytest.fixture(scope="module")
def expected(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    work = tmp_path_factory.mktemp("alone")
    launch("train.py", make_config(tokens, work))
    return losses(work / "run")


def make_config(tokens: Path, work: Path) -> Path:
    run = {"dir": str(work / "run"), "steps": STEPS, "seed": 7, "checkpoint_every": EVERY}
    # slower steps, so that a pod can be ended between two of them
    return write_config(work / "train.json", tiny_config(tokens, work / "run", run=run, parallel={"elastic": True}))


def step(work: Path) -> int:
    return max(losses(work / "run", written=False), default=0) if (work / "run/metrics.jsonl").exists() else 0


@pytest.mark.parametrize(("count", "killed"), [(2, 0), pytest.param(4, 2, marks=pytest.mark.sweep)])
def test_a_killed_pod_comes_back_and_the_losses_are_those_of_one_process(
    tokens: Path, tmp_path: Path, expected: dict[int, float], count: int, killed: int
) -> None:
    command = command_of_manifest(make_config(tokens, tmp_path))
    with Pods(tmp_path / "pods", count, command, tokens) as pods:
        pods.run_until(lambda: step(tmp_path) > EVERY)
        pods.kill(killed)
        pods.run_until(lambda: pods.succeeded)
        assert pods.succeeded, pods.logs()
        assert pods.ended[killed] == [137, 0]
        assert {tuple(codes) for index, codes in pods.ended.items() if index != killed} == {(76, 0)}
        assert f"pods: {count} processes" in (tmp_path / "pods/0.log").read_text()
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)


@pytest.mark.sweep
def test_an_evicted_pod_saves_the_run_without_failure(tokens: Path, tmp_path: Path, expected: dict[int, float]) -> None:
    command = command_of_manifest(make_config(tokens, tmp_path))
    with Pods(tmp_path / "pods", 2, command, tokens) as pods:
        pods.run_until(lambda: step(tmp_path) > EVERY)
        pods.evict(1)
        pods.run_until(lambda: pods.succeeded)
        assert pods.succeeded, pods.logs()
        assert pods.ended == {0: [75, 0], 1: [75, 0]}
        assert not pods.failures.total()
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)


def test_a_refused_config_fails_the_job_once(tokens: Path, tmp_path: Path) -> None:
    command = command_of_manifest(make_config(tokens, tmp_path), "optimizer.type=AdamV")
    with Pods(tmp_path / "pods", 2, command, tokens) as pods:
        pods.run_until(lambda: pods.succeeded)
        assert pods.failed
        assert {code for codes in pods.ended.values() for code in codes} == {2}
        assert "AdamV" in pods.logs()
    assert not (tmp_path / "run").exists()


@pytest.mark.sweep
def test_torchrun_in_pods_reads_the_same_variables(tokens: Path, tmp_path: Path, expected: dict[int, float]) -> None:
    torchrun = [warm_python.python(), "-m", "torch.distributed.run", "-m", "pipeline.train"]
    command = [*torchrun, "--config", str(make_config(tokens, tmp_path))]
    with Pods(tmp_path / "pods", 2, command, tokens, counted_only=True) as pods:
        pods.run_until(lambda: step(tmp_path) > EVERY)
        pods.kill(1)
        pods.run_until(lambda: pods.succeeded)
        assert pods.succeeded, pods.logs()
        assert pods.ended == {0: [1, 0], 1: [137, 0]}  # torchrun makes 1 of the 76
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)
