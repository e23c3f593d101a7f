"""Manifests and sky.yaml are valid by strict schemas, misspelt keys are refused, each says what docs promise."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_prep.config.corpus import CorpusConfig
from foundation.errors import EXIT_FOLLOWED, EXIT_LOST, EXIT_REQUEUE, EXIT_USAGE
from foundation.section import parse
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from tests.conftest import ROOT, losses, tiny_config, write_config
from tests.k8s.manifests import FOLDERS, K8S, build, check, document, documents, jobs_of, misspelt, need_kubectl

PREP = [folder for folder in FOLDERS if folder.endswith("data-prep")]
TRAIN = [folder for folder in FOLDERS if folder.endswith("train")]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_builds_and_its_manifests_are_valid(folder: str) -> None:
    found = documents(folder)
    assert found
    for manifest in found:
        check(manifest)


@pytest.mark.integration
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_misspelt_key_of_a_manifest_is_refused(folder: str) -> None:
    accepted = []
    for manifest in documents(folder):
        if manifest["kind"] == "ConfigMap":
            continue
        for path, changed in misspelt(manifest):
            try:
                check(changed)
            except Exception:  # each validator has its own
                continue
            accepted.append(f"{manifest['kind']} {path}")
    assert accepted == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_misspelt_key_of_a_kustomization_is_refused(folder: str, tmp_path: Path) -> None:
    need_kubectl()
    shutil.copytree(K8S, tmp_path / "k8s")
    file = tmp_path / "k8s" / folder / "kustomization.yaml"
    file.write_text(file.read_text().replace("resources:", "resource:", 1))
    with pytest.raises(subprocess.CalledProcessError) as refused:
        build(file.parent)
    assert 'unknown field "resource"' in refused.value.stderr.replace("\\", "")  # Debian's kubectl quotes the message


def pod_specs(folder: str) -> list[dict[str, Any]]:
    found = documents(folder)
    jobs = [each for each in found if each["kind"] == "Job"] + [job for each in found for job in jobs_of(each)]
    return [job["spec"]["template"]["spec"] for job in jobs]


@pytest.mark.parametrize("folder", PREP + TRAIN)
def test_pods_have_no_rights(folder: str) -> None:
    (pod,) = pod_specs(folder)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    context = container["securityContext"]
    assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
    assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("folder", PREP + TRAIN)
def test_claims_and_config_maps_exist_under_the_names_that_pods_mount(folder: str) -> None:
    claims = {each["metadata"]["name"] for each in documents("base/storage")}
    maps = {each["metadata"]["name"] for each in documents(folder) if each["kind"] == "ConfigMap"}
    (pod,) = pod_specs(folder)
    volumes = pod["volumes"]
    assert {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each} <= claims
    assert {each["configMap"]["name"] for each in volumes if "configMap" in each} == maps
    mounts = {each["name"] for each in pod["containers"][0]["volumeMounts"]}
    assert mounts == {each["name"] for each in volumes}


@pytest.mark.parametrize("folder", PREP)
def test_data_prep_has_as_many_pods_at_once_as_shares(folder: str) -> None:
    job = document(folder, "Job")
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    shares = int(args[args.index("--of") + 1])
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (shares, shares)
    assert job["spec"]["completionMode"] == "Indexed"
    assert action(job, EXIT_USAGE) == "FailJob"
    assert action(job, 137) == "Count"


@pytest.mark.parametrize("folder", TRAIN)
def test_the_pods_of_a_run_read_the_shards_and_have_shared_memory_and_time_to_save(folder: str) -> None:
    (pod,) = pod_specs(folder)
    mounts = {each["mountPath"]: each for each in pod["containers"][0]["volumeMounts"]}
    assert mounts["/tokens"]["readOnly"] is True
    assert "readOnly" not in mounts["/runs"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
    assert pod["terminationGracePeriodSeconds"] > 30  # the default


@pytest.mark.parametrize("folder", TRAIN)
def test_the_exit_codes_decide_whether_a_pod_is_started_again(folder: str) -> None:
    (job,) = jobs_of(document(folder, "TrainingRuntime"))
    codes = (1, EXIT_USAGE, EXIT_REQUEUE, EXIT_LOST, EXIT_FOLLOWED, 137)
    assert [action(job, code) for code in codes] == ["FailJob", "FailJob", "Ignore", "Count", "Ignore", "Count"]
    assert job["spec"]["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # the policy needs it


def action(job: dict[str, Any], code: int) -> str:
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        if code in rule.get("onExitCodes", {}).get("values", []):
            return str(rule["action"])
    return "Count"


@pytest.mark.parametrize("folder", PREP + TRAIN)
def test_kueue_finds_its_queue(folder: str) -> None:
    kind = "Job" if folder in PREP else "TrainJob"
    assert document(folder, kind)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "headrace"


@pytest.mark.parametrize("folder", TRAIN)
def test_the_config_of_a_run_resolves_for_its_pods(folder: str, tmp_path: Path) -> None:
    trainer = document(folder, "TrainJob")["spec"]["trainer"]
    text = document(folder, "ConfigMap")["data"]["train.json"].replace("/opt/headrace", str(ROOT))
    (tmp_path / "train.json").write_text(text)
    run = resolve(load_config(tmp_path / "train.json"), world_size=trainer["numNodes"] * trainer["numProcPerNode"])
    assert run.steps > 0
    assert trainer["args"] == ["headrace", "train", "--config", "/etc/headrace/train.json"]
    assert document(folder, "TrainJob")["spec"]["runtimeRef"]["name"] == "headrace"


@pytest.mark.parametrize("folder", PREP)
def test_the_config_of_data_prep_is_accepted_and_writes_what_training_reads(folder: str) -> None:
    config = parse(CorpusConfig, json.loads(document(folder, "ConfigMap")["data"]["corpus.json"]))
    assert config.output == "/tokens/corpus"
    for train in TRAIN:
        assert json.loads(document(train, "ConfigMap")["data"]["train.json"])["data"]["sources"] == [
            {"path": config.output}
        ]


TASK = yaml.safe_load((K8S / "sky.yaml").read_text())
# SkyPilot needs an older click than headrace, so that it has an environment of its own
PYTHON = Path(os.environ.get("HEADRACE_SKY_PYTHON", ROOT / ".venv-sky/bin/python"))
NEEDS_SKY = pytest.mark.skipif(not PYTHON.exists(), reason=f"needs SkyPilot in {PYTHON} (.ci/run installs it)")
(MOUNTED_CONFIG,) = TASK["file_mounts"]
USERS_KEYS = ("volumes.", "file_mounts.")


def refusals(tasks: list[Any]) -> list[str | None]:
    command = [str(PYTHON), str(ROOT / "tests/k8s/check_sky.py")]
    # it would tell its authors that it was used
    env = os.environ | {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, input=json.dumps(tasks), capture_output=True, text=True, check=True, timeout=120, env=env
    )
    found: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.integration
def test_the_commands_of_the_task_train_on_the_nodes_that_its_variables_name(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", run={"dir": str(tmp_path / "run"), "steps": 6, "seed": 7})
    config["scheduler"]["params"] = {"warmup_num_steps": 2, "decay_num_steps": 2}
    commands = TASK["run"].replace(MOUNTED_CONFIG, str(write_config(tmp_path / "train.json", config)))
    with socket.socket() as probe:  # two nodes of this machine: its usual port may be taken
        probe.bind(("127.0.0.1", 0))
        commands = commands.replace("29400", str(probe.getsockname()[1]))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1\n",
    }
    nodes = [
        subprocess.Popen(
            ["bash", "-c", commands],
            env={**os.environ, **given, "PATH": path, "SKYPILOT_NODE_RANK": rank},
            cwd=tmp_path,
        )
        for rank in ("0", "1")
    ]
    assert [node.wait(timeout=240) for node in nodes] == [0, 0]
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


@NEEDS_SKY
def test_the_task_is_valid_and_every_misspelt_key_is_refused() -> None:
    changed = {path: task for path, task in misspelt(TASK) if not path.startswith(USERS_KEYS)}
    valid, *answers = refusals([TASK, *changed.values()])
    assert valid is None
    assert [path for path, answer in zip(changed, answers, strict=True) if answer is None] == []
    assert len(changed) >= 10


def test_the_codes_that_start_the_job_again_are_those_of_a_lost_or_stopped_run() -> None:
    codes = TASK["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert {EXIT_LOST, EXIT_REQUEUE, 137} == set(codes)
    assert EXIT_USAGE not in codes


def test_the_files_that_the_task_mounts_are_here() -> None:
    assert all((ROOT / path).is_file() for path in TASK["file_mounts"].values())
