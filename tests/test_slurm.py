"""The job scripts in `slurm/` on a real Slurm with two nodes: data prep by job arrays, ZeRO-3 across nodes, requeue."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.support import last_step, wait_until
from tests.virtual_cluster.cluster import VirtualCluster
from tests.virtual_cluster.settings import Patience
from tests.virtual_cluster.slurm_run import NEEDS_SLURM, SlurmRun, job_env, module_cluster

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
WORKERS = 4
STEPS = 6
LONG = 150
"""Steps of a run that is long enough to be interrupted."""

pytestmark = NEEDS_SLURM
cluster = module_cluster(nodes=2, cpus=2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data-prep config of about ten map tasks over a part of Python's own library; its output has to be set."""
    directory = tmp_path_factory.mktemp("corpus")
    text = directory / "text"
    text.mkdir()
    for file in sorted(Path(sysconfig.get_path("stdlib"), "asyncio").glob("*.py")):
        (text / file.name).write_bytes(file.read_bytes())
    config = {
        "output": "not set",
        "sources": [{"path": str(text), "include": ["*.py"]}],
        "tokenizer": {"train": "bpe", "vocab_size": 512},
        "heldout_fraction": 0.1,
        "task_bytes": 50_000,
    }
    return _write(directory / "corpus.json", config)


@pytest.fixture(scope="module")
def tokens(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("direct") / "tokens"
    command = [sys.executable, "-m", "data_prep", "--config", str(corpus), "--set", f"output={output}"]
    subprocess.run(command, cwd=ROOT, check=True)
    return output


def test_job_arrays_write_the_same_tokens_as_one_machine_and_a_concurrent_submission_is_refused(
    cluster: VirtualCluster, corpus: Path, tokens: Path, tmp_path: Path
) -> None:
    submitted = _submit_tokens(cluster, corpus, tmp_path)
    with pytest.raises(RuntimeError, match="is queued or running: headrace-"):
        _submit_tokens(cluster, corpus, tmp_path)
    wait_until(lambda: {node for node in ("n1", "n2") if f"{node}:" in _status(corpus, tmp_path)} == {"n1", "n2"})
    log = _end_of_chain(cluster, submitted)
    jobs = {(job.name, job.element): job for job in cluster.jobs()}
    assert jobs["headrace-finish", None].state == "COMPLETED", log
    for phase in ("map", "reduce"):
        assert {jobs[f"headrace-{phase}", str(element)].nodes for element in range(WORKERS)} == {"n1", "n2"}
    made, expected = _manifest(tmp_path / "tokens"), _manifest(tokens)
    assert made["files"] == expected["files"]
    assert made["fingerprint"] == expected["fingerprint"]

    before = len(cluster.jobs())
    assert "nothing to do" in _submit_tokens(cluster, corpus, tmp_path)
    assert len(cluster.jobs()) == before


def test_a_single_job_writes_the_same_tokens_with_several_workers(
    cluster: VirtualCluster, corpus: Path, tokens: Path, tmp_path: Path
) -> None:
    options = ["--cpus-per-task=2", f"--output={tmp_path}/log"]
    given = ["--config", str(corpus), "--set", f"output={tmp_path}/tokens"]
    number = cluster.sbatch("slurm/data_prep.sbatch", *given, options=options, cwd=ROOT, env=job_env())
    assert cluster.wait(number).state == "COMPLETED", (tmp_path / "log").read_text()
    assert _manifest(tmp_path / "tokens")["fingerprint"] == _manifest(tokens)["fingerprint"]


def test_a_killed_command_is_run_again_and_a_node_that_lacks_the_input_is_left_out(
    cluster: VirtualCluster, corpus: Path, tokens: Path, tmp_path: Path
) -> None:
    # a mount that is missing on one node: that node sees the corpus' directory, but empty
    second_node = cluster.node("n2").machine
    second_node.run("mount", "-t", "tmpfs", "tmpfs", str(corpus.parent / "text"))
    before = len(cluster.jobs())
    submitted = _submit_tokens(cluster, corpus, tmp_path)
    _kill_a_map_job(cluster, node="n1")
    log = _end_of_chain(cluster, submitted)
    second_node.run("umount", str(corpus.parent / "text"))
    jobs = {(job.name, job.element): job for job in cluster.jobs()[before:]}
    assert jobs["headrace-finish", None].state == "COMPLETED", log
    assert {jobs["headrace-map", str(element)].nodes for element in range(WORKERS)} == {"n1"}
    logs = [file.read_text() for file in tmp_path.glob("tokens.logs/1/map-*.out")]
    assert any("failed on n2: once more, on another node" in text for text in logs)
    assert any("attempt 1 of 5 on n1 failed with exit code 137" in text for text in logs)
    assert _manifest(tmp_path / "tokens")["fingerprint"] == _manifest(tokens)["fingerprint"]


def test_failed_map_jobs_stop_the_chain_with_a_report_and_a_second_submission_completes_it(
    cluster: VirtualCluster, corpus: Path, tokens: Path, tmp_path: Path
) -> None:
    text, away = corpus.parent / "text", corpus.parent / "away"
    before = len(cluster.jobs())
    submitted = _submit_tokens(cluster, corpus, tmp_path)
    wait_until((tmp_path / ".tokens.job/tokenizer/done.json").exists)  # the last thing that prepare makes
    text.rename(away)  # on both nodes
    log = _end_of_chain(cluster, submitted)
    states = {(job.name, job.element): job.state for job in cluster.jobs()[before:]}
    failed = [job for job, state in states.items() if job[0] == "headrace-map" and state == "FAILED"]
    assert len(failed) > 1, log
    assert states["headrace-finish", None] == "CANCELLED"
    assert states["headrace-report", None] == "FAILED"
    assert f"the job was not finished: {len(failed)} of its Slurm jobs failed" in log
    assert "FAILED (NonZeroExitCode)" in log
    assert not (tmp_path / "tokens").exists()
    assert "FAILED (NonZeroExitCode)" in _status(corpus, tmp_path)  # kept in the job directory

    away.rename(text)
    log = _end_of_chain(cluster, _submit_tokens(cluster, corpus, tmp_path))
    assert "error" not in log
    assert (tmp_path / "tokens.logs/2/chain.out").exists()
    assert _manifest(tmp_path / "tokens")["fingerprint"] == _manifest(tokens)["fingerprint"]


def test_an_element_whose_node_crashes_is_run_by_another_node_and_the_chain_goes_on(
    corpus: Path, tokens: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with VirtualCluster(
        tmp_path_factory.mktemp("nodes"), nodes=2, cpus=2, patience=Patience(down_after_s=5)
    ) as cluster:
        submitted = _submit_tokens(cluster, corpus, tmp_path)
        _kill_a_map_job(cluster, node="n2", signal="STOP")  # so that it runs still
        cluster.node("n2").crash()
        log = _end_of_chain(cluster, submitted)
        finish = next(job for job in cluster.jobs() if job.name == "headrace-finish")
    assert finish.state == "COMPLETED", log
    assert _manifest(tmp_path / "tokens")["fingerprint"] == _manifest(tokens)["fingerprint"]


def test_zero3_on_two_nodes_has_the_losses_of_one_host(cluster: VirtualCluster, tokens: Path, tmp_path: Path) -> None:
    local = _training_config(tmp_path, name="one_machine", tokens=tokens)
    command = [str(BIN / "deepspeed"), "--num_accelerators", "2", "pipeline/train.py", "--config", str(local)]
    cluster.run(*command, cwd=ROOT, env=job_env(), timeout_s=240)

    distributed = _training_config(tmp_path, name="two_nodes", tokens=tokens)
    options = ["--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/train.out"]
    job = cluster.wait(
        cluster.sbatch("slurm/train.sbatch", str(distributed), options=options, cwd=ROOT, env=job_env()), timeout_s=240
    )
    log = (tmp_path / "train.out").read_text()
    assert (job.state, job.nodes) == ("COMPLETED", "n[1-2]"), log
    assert "agents: start 1 on n1, n2 (start)" in log

    expected, found = _losses(tmp_path / "one_machine"), _losses(tmp_path / "two_nodes")
    assert list(expected) == list(range(1, STEPS + 1))
    # fp32 and the same two ranks: only the order of a sum may differ, which is about 1e-7
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_refused_config_ends_the_job_with_code_2_and_one_message(cluster: VirtualCluster, tmp_path: Path) -> None:
    options = ["--nodes=2", f"--output={tmp_path}/train.out"]
    job = cluster.wait(cluster.sbatch("slurm/train.sbatch", "absent.json", options=options, cwd=ROOT, env=job_env()))
    log = (tmp_path / "train.out").read_text()
    assert (job.state, job.exit_code) == ("FAILED", 2), log
    assert log.count("error: ") == 1
    assert "no such file" in log
    assert log.splitlines()[-1].startswith("reason: --config = 'absent.json': no such file")


def test_a_job_with_fewer_tasks_than_gpus_is_refused(cluster: VirtualCluster, tmp_path: Path) -> None:
    options = ["--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=2", f"--output={tmp_path}/train.out"]
    job = cluster.wait(cluster.sbatch("slurm/train.sbatch", "absent.json", options=options, cwd=ROOT, env=job_env()))
    assert job.exit_code == 2
    assert "1 tasks but 2 GPUs per node" in (tmp_path / "train.out").read_text()


def test_a_stop_request_queues_a_job_again_and_a_sigterm_of_a_person_ends_it_with_a_checkpoint(
    cluster: VirtualCluster, tokens: Path, tmp_path: Path
) -> None:
    config, log = _long_config(tmp_path, tokens), tmp_path / "train.out"
    options = ["--nodes=2", f"--output={log}"]
    number = cluster.sbatch("slurm/train.sbatch", str(config), options=options, cwd=ROOT, env=job_env())
    wait_until(lambda: last_step(tmp_path / "long") >= 5)
    cluster.run("scancel", "--signal=USR1", str(number))  # as Slurm does before the time limit
    wait_until(lambda: "resuming after step" in log.read_text())
    resumed = int(log.read_text().partition("resuming after step ")[2].split()[0])
    wait_until(lambda: last_step(tmp_path / "long") > resumed)
    cluster.run("scancel", "--signal=TERM", str(number))
    job = cluster.wait(number, timeout_s=240)
    text, steps = log.read_text(), list(_losses(tmp_path / "long"))
    assert (job.state, job.exit_code) == ("FAILED", 130), text
    assert text.count("stopped by SIGUSR1") == 2  # which the agents send to the ranks
    assert text.count("back into the queue") == 1
    assert f"job {number}: ended with code 130: stopped by SIGTERM: submit it again to go on" in text
    assert steps == list(range(1, len(steps) + 1))
    assert (tmp_path / f"long/checkpoints/step-{len(steps):08d}").is_dir()


def test_a_job_stopped_three_times_early_is_held(cluster: VirtualCluster, tokens: Path, tmp_path: Path) -> None:
    config, log = _long_config(tmp_path, tokens), tmp_path / "train.out"
    options = ["--nodes=2", f"--output={log}"]
    number = cluster.sbatch("slurm/train.sbatch", str(config), options=options, cwd=ROOT, env=job_env())
    for start in (1, 2, 3):
        wait_until(lambda starts=start: log.exists() and log.read_text().count("tasks\n") == starts)
        # there is no agent yet: the script remembers the request
        cluster.run("scancel", "--batch", "--signal=USR1", str(number))
        wait_until(lambda stops=start: log.read_text().count("agents: stopped before the start") == stops)
    wait_until(lambda: "JobState=PENDING" in cluster.run("scontrol", "show", "job", str(number)))
    job = cluster.run("scontrol", "show", "job", str(number))
    cluster.run("scancel", str(number))
    assert "Priority=0 " in job  # held, for a person to release it
    text = log.read_text()
    assert text.count("back into the queue") == 2
    assert "held, since 3 starts have not made a new checkpoint" in text
    assert not (tmp_path / "long/metrics.jsonl").exists()


@pytest.mark.sweep
def test_a_run_that_loses_a_rank_and_then_its_first_node_goes_on_and_ends_as_completed(
    tokens: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The batch script is gone with the first node. One restart is allowed until there is a new checkpoint."""
    state = tmp_path_factory.mktemp("nodes")  # a socket's path has room for 108 characters
    with VirtualCluster(state, nodes=2, cpus=2, patience=Patience(down_after_s=5)) as cluster:
        run = SlurmRun(cluster, tmp_path / "long", tmp_path / "train.out")
        run.submit(_long_config(tmp_path, tokens), ["--nodes=2"], HEADRACE_RESTARTS="1", HEADRACE_DEAD="5")
        run.wait_for_step(12)
        cluster.node("n2").machine.run("pkill", "-KILL", "-f", "[-]m pipeline.train --config")
        run.wait_for_step(32)
        options = [f"--dependency=afterok:{run.job}", "--output=/dev/null", "--wrap=true"]
        after = int(cluster.run("sbatch", "--parsable", *options))
        cluster.node("n1").crash()
        job = cluster.wait(run.job, timeout_s=360)  # its first node does not come back
        waiting = cluster.wait(after)
    assert (job.state, waiting.state) == ("COMPLETED", "COMPLETED"), run.text()
    assert "start 2 on n1, n2 (a rank was lost: rank 1 on n2 was ended by SIGKILL" in run.text()
    assert "start 3 on n2 (n1 does not answer)" in run.text()
    assert "resuming after step 3" in run.text()  # 30, or a later one
    assert list(run.losses()) == list(range(1, LONG + 1))


def _long_config(directory: Path, tokens: Path) -> Path:
    path = _training_config(directory, name="long", tokens=tokens)
    config = json.loads(path.read_text())
    config["run"] |= {"steps": LONG, "checkpoint_every": 10}
    return _write(path, config)


def _submit_tokens(cluster: VirtualCluster, corpus: Path, directory: Path) -> str:
    command = [sys.executable, "-m", "data_prep", "--executor", "slurm", "--workers", str(WORKERS)]
    output = ["--config", str(corpus), "--set", f"output={directory}/tokens"]
    return cluster.run(*command, *output, cwd=directory, env=job_env())


def _status(corpus: Path, directory: Path) -> str:
    """Output of `status` here, outside of the cluster."""
    command = [sys.executable, "-m", "data_prep", "status", "--config", str(corpus)]
    command += ["--set", f"output={directory}/tokens"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _end_of_chain(cluster: VirtualCluster, submitted: str) -> str:
    """Waits for all jobs; returns the log that the output of a submission names."""
    cluster.wait_for_all(timeout_s=120)
    return Path(submitted.split("logs: ")[1].partition(",")[0]).read_text()


def _kill_a_map_job(cluster: VirtualCluster, *, node: str, signal: str = "KILL") -> None:
    """Signals a map job on a node as soon as there is one; KILL is what the kernel's out-of-memory killer sends."""

    def killed() -> bool:
        try:
            cluster.node(node).machine.run("pkill", f"-{signal}", "--oldest", "-f", "data_prep phase map")
        except RuntimeError:
            return False
        return True

    wait_until(killed)


def _training_config(directory: Path, *, name: str, tokens: Path) -> Path:
    config = {
        "engine": "deepspeed",
        "zero_optimization": {"stage": 3},
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            }
        },
        "data": {"sources": [{"path": str(tokens)}], "sequence_length": 64},
        "run": {"dir": str(directory / name), "steps": STEPS, "seed": 1},
    }
    return _write(directory / f"{name}.json", config)


def _losses(run: Path) -> dict[int, float]:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}


def _manifest(directory: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    return manifest


def _write(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(json.dumps(config, indent=1))
    return path
