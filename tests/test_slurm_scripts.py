"""The job scripts where only the installed package's files are: no clone, no .venv, stand-ins for Slurm's commands."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

_STAND_INS = {
    "scontrol": "echo n1",
    "squeue": "echo n1",
    # options begin with --, the command follows
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    # -c is the check of the environment, which is made with the real one; an agent leaves the outcome of the run
    "python": """if [ "$1" = -c ]; then exec "$REAL_PYTHON" "$@"; fi
echo "$@" >> "$CALLS"
case "$*" in
    *--progress*) echo "0 run" ;;
    *pipeline.cluster.elastic*) printf '0\\nfinished\\n' > run/.agents/7.0/outcome ;;
esac""",
}


_SRUN = """
per_node=${SLURM_GPUS_PER_NODE:-} total=${SLURM_GPUS:-}
while [[ $1 == --* ]]; do
    case $1 in
        --gpus-per-node=*) per_node=${1#*=} ;;
        --gpus=*) total=${1#*=} ;;
        --ntasks=*) tasks=${1#*=} ;;
    esac
    shift
done
[ "${total:-0}" -le 8 ] || { echo "srun: error: Unable to create step: Invalid generic resource" >&2; exit 1; }
count=${total:-${per_node##*:}}
[ -z "${SLURM_GPUS_PER_TASK:-}" ] || count=$((tasks * SLURM_GPUS_PER_TASK))
export GPUS_OF_STEP=${count:-8}
exec "$@"
"""
"""Gives a step of one node of 8 GPUs those that Slurm 22.05 gave it: by the options, and by the job's own variables."""


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """What a wheel unpacks: the scripts without the repository around them."""
    shutil.copytree(ROOT / "slurm", tmp_path / "share" / "slurm")
    (tmp_path / "bin").mkdir()
    for name, body in _STAND_INS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    return tmp_path / "share"


def run_script(
    share: Path, name: str, *arguments: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs a copy of a script from another directory, as Slurm does; returns it and the python calls."""
    work = share.parent
    spool = shutil.copy(share / "slurm" / name, work / "slurm_script")
    env = {name: value for name, value in os.environ.items() if name != "HEADRACE_VENV"} | {
        "PATH": f"{work}/bin:/usr/bin:/bin",
        "HEADRACE_ROOT": str(share),
        "PYTHONPATH": str(ROOT),
        "REAL_PYTHON": sys.executable,
        "CALLS": str(work / "calls"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS": "1",
        "SLURMD_NODENAME": "n1",
        **variables,
    }
    done = subprocess.run(
        ["bash", spool, *arguments], cwd=work, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    calls = (work / "calls").read_text().splitlines() if (work / "calls").exists() else []
    return done, calls


def test_training_starts_the_installed_module_and_needs_no_clone(share: Path) -> None:
    done, calls = run_script(share, "train.sbatch", "c.json", "--set", "run.steps=3")
    assert done.returncode == 0, done.stderr
    assert calls[0] == "-m pipeline check --progress --config c.json --set run.steps=3"
    option, agent, *options, module, config, file, key, value = calls[-1].split()
    assert (option, agent) == ("-m", "pipeline.cluster.elastic")
    assert [config, file, key, value] == ["--config", "c.json", "--set", "run.steps=3"]
    assert importlib.util.find_spec(module) is not None
    assert options[options.index("--join-script") + 1] == str(share / "slurm/join.sbatch")


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_GPUS_PER_TASK": "1"},
        {"SLURM_GPUS": "32"},
        {"SLURM_GPUS_PER_NODE": "h100:8"},
        {},  # --gres=gpu:8, of which srun reads nothing
    ],
)
def test_an_agents_step_has_all_gpus_of_its_node_however_the_job_asked_for_them(
    share: Path, variables: dict[str, str]
) -> None:
    (share.parent / "bin" / "srun").write_text(f"#!/usr/bin/env bash\n{_SRUN}")
    said = _STAND_INS["python"].replace('echo "$@"', 'echo "gpus $GPUS_OF_STEP" "$@"')
    (share.parent / "bin" / "python").write_text(f"#!/usr/bin/env bash\n{said}")
    done, calls = run_script(share, "train.sbatch", "c.json", SLURM_GPUS_ON_NODE="8", SLURM_NTASKS="8", **variables)
    assert done.returncode == 0, done.stderr
    assert calls[-1].startswith("gpus 8 -m pipeline.cluster.elastic")


def test_data_prep_needs_no_clone_either(share: Path) -> None:
    done, calls = run_script(share, "data_prep.sbatch", "--config", "c.json")
    assert done.returncode == 0, done.stderr
    assert calls == ["-m data_prep --workers 1 --config c.json"]


def test_an_element_that_fails_goes_to_another_node_of_a_partition_of_thousands(share: Path) -> None:
    """sinfo prints more than the buffer of a pipe holds."""
    stand_ins = {
        "python": '[ "$1" != -m ] || exit 3',
        "sinfo": "seq -f node%g.a-cluster-with-long-names.example 20000",
        "scontrol": 'echo "scontrol $*" >> "$CALLS"',
    }
    for name, body in stand_ins.items():
        (share.parent / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (share.parent / "bin" / name).chmod(0o755)
    variables = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_PARTITION": "cpu"}
    done, calls = run_script(share, "data_prep.sbatch", "phase", "map", **variables)
    assert done.returncode == 3, done.stderr
    assert "failed on n1: once more, on another node" in done.stderr
    assert calls == ["scontrol requeue 7_2", "scontrol update JobId=7_2 ExcNodeList=n1"]
    (share.parent / "bin" / "sinfo").write_text("#!/usr/bin/env bash\necho n1\n")
    done, calls = run_script(share, "data_prep.sbatch", "phase", "map", **variables)
    assert (done.returncode, len(calls)) == (3, 2)  # there is no other


def test_a_python_without_headrace_is_refused_with_the_variable_to_set(share: Path) -> None:
    done, calls = run_script(share, "train.sbatch", "c.json", REAL_PYTHON="/bin/false")
    assert done.returncode == 2
    assert "export HEADRACE_VENV=PATH" in done.stderr
    assert calls == []


def test_the_code_of_headrace_root_runs_whatever_the_venv_and_the_working_directory_hold(tmp_path: Path) -> None:
    clones = [tmp_path / "root", tmp_path / "other"]
    for clone in clones:
        shutil.copytree(ROOT / "slurm", clone / "slurm")
        shutil.copytree(ROOT / "foundation", clone / "foundation")
        (clone / "headrace").mkdir()
        shutil.copy(ROOT / "headrace" / "__init__.py", clone / "headrace")
    script = f"source {clones[0]}/slurm/env.sh; python -c 'import headrace; print(headrace.__file__)'"
    # the environment of the tests has this repository installed, the working directory another clone
    env = {**os.environ, "HEADRACE_VENV": "", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(["bash", "-c", script], cwd=clones[1], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(clones[0] / "headrace" / "__init__.py")
