"""Builds the manifests of k8s/ as `kubectl apply -k` does, and validates each by the strict schema of its kind."""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

K8S = ROOT / "k8s"
FOLDERS = sorted(str(path.parent.relative_to(K8S)) for path in K8S.rglob("kustomization.yaml"))
KUBERNETES = "1.35"
"""Version of the schemas: that of the kubectl that builds the manifests in CI."""
FREE_KEYS = {"labels", "annotations", "data", "requests", "limits"}
"""Maps whose keys are the user's own."""


def need_kubectl() -> str:
    """The path of kubectl; skips the test where there is none."""
    found = shutil.which("kubectl")
    if found is None:
        pytest.skip("needs kubectl, whose kustomize builds the overlays (.ci/run installs it)")
    return found


def build(folder: Path) -> list[dict[str, Any]]:
    """The documents that kustomize makes of a folder."""
    command = [need_kubectl(), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return list(yaml.safe_load_all(done.stdout))


@cache
def _built(name: str) -> tuple[dict[str, Any], ...]:
    return tuple(build(K8S / name))


def documents(name: str) -> list[dict[str, Any]]:
    return copy.deepcopy(list(_built(name)))


def document(name: str, kind: str) -> dict[str, Any]:
    (found,) = (each for each in documents(name) if each["kind"] == kind)
    return found


def check(manifest: dict[str, Any]) -> None:
    """Validates a manifest strictly; raises what its validator raises."""
    if not manifest["apiVersion"].startswith("trainer.kubeflow.org/"):
        validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate (.ci/run installs it)")
        validator.validate(manifest, KUBERNETES, strict=True)
        return
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api (.ci/run installs it)"
    )
    model = getattr(models, f"TrainerV1alpha1{manifest['kind']}")
    # the models drop what they do not know, in silence
    understood = model.from_dict(copy.deepcopy(manifest)).to_dict()
    if understood != manifest:
        raise ValueError(f"not understood: {list(_differences(manifest, understood))}")
    for job in jobs_of(manifest):
        check(job)


def jobs_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The Jobs that a TrainingRuntime describes, as manifests of their own."""
    if manifest["kind"] != "TrainingRuntime":
        return []
    replicated = manifest["spec"]["template"]["spec"]["replicatedJobs"]
    head = {"apiVersion": "batch/v1", "kind": "Job"}
    return [{**head, **copy.deepcopy(each["template"])} for each in replicated]


def _differences(given: Any, understood: Any, at: str = "") -> Iterator[str]:
    if isinstance(given, dict) and isinstance(understood, dict):
        for key, value in given.items():
            yield from _differences(value, understood.get(key), f"{at}.{key}")
    elif isinstance(given, list) and isinstance(understood, list) and len(given) == len(understood):
        for index, pair in enumerate(zip(given, understood, strict=True)):
            yield from _differences(*pair, f"{at}.{index}")
    elif given != understood:
        yield f"{at} = {given!r}"


def misspelt(manifest: Any) -> Iterator[tuple[str, Any]]:
    """Every copy of a manifest with one of its keys misspelt, and the path of that key."""
    for path in list(_paths(manifest)):
        changed = copy.deepcopy(manifest)
        inner = changed
        for step in path[:-1]:
            inner = inner[step]
        inner[f"{path[-1]}s"] = inner.pop(path[-1])
        yield ".".join(map(str, path)), changed


def _paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from _paths(each, (*at, index))
    elif isinstance(value, dict):
        for key, each in value.items():
            if not at or at[-1] not in FREE_KEYS:
                yield (*at, key)
            yield from _paths(each, (*at, key))
