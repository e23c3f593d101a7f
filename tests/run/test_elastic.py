"""A run goes on with the processes that are left: same global batches, same curve, nobody asked."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.data.micro_batch import IGNORE
from pipeline.engines.objective import CrossEntropy
from pipeline.runtime.launch import Launch
from pipeline.runtime.launch.group import free_port
from pipeline.runtime.launch.rendezvous import RUN_FINISHED, RUN_STOPPED
from pipeline.runtime.launch.store import open_rendezvous
from tests import warm_python
from tests.conftest import ROOT, entry_point, launch, losses, start, tiny_config, warm_command, write_config
from tests.engines.comparison import FP32
from tests.support import last_step, refusal_of, wait_until


def test_rows_without_targets_add_exactly_nothing() -> None:
    torch.manual_seed(0)
    logits = (100 * torch.randn(2, 5, 11)).requires_grad_()
    labels = torch.full((2, 5), IGNORE)
    total = CrossEntropy(z_loss=1e-3)(logits, labels).total
    (total * 1e6).backward()
    assert total.item() == 0.0
    assert logits.grad.count_nonzero() == 0  # nan would count


@pytest.fixture(scope="module")
def work(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with c.json: ZeRO-3 on documents apart, with a checkpoint after every fifth of 40 steps."""
    work = tmp_path_factory.mktemp("elastic")
    write_config(work / "c.json", {**forty_steps(tokens, work / "run"), "parallel": {"elastic": True}})
    return work


def forty_steps(tokens: Path, run_dir: Path) -> dict[str, Any]:
    config = tiny_config(tokens, run_dir, loss={"z_loss": 1e-3})
    config["data"]["mask_documents"] = True
    config["run"]["steps"] = 40
    return config


@pytest.fixture(scope="module")
def expected(work: Path) -> dict[int, float]:
    """The losses of one plain process that nobody stopped."""
    launch("train.py", work / "c.json", "engine=torch", "run.dir=whole")
    return losses(work / "whole")


@pytest.fixture
def rendezvous_port() -> Iterator[int]:
    """Port of a store where torchruns find each other, on a host of its own: this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def agent(work: Path, run_dir: Path, *, port: int, processes: int) -> subprocess.Popen[bytes]:
    """Starts a torchrun that is one node of at most two; what it says is in work/said-PROCESSES."""
    # a node says each second that it is there; after 30 s of silence it is lost, and others are waited for up to 60 s
    patience = "is_host=false,keep_alive_interval=1,keep_alive_max_attempt=30,last_call_timeout=60"
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={patience}"]
    nodes = ["--rdzv-id=elastic", "--nnodes=1:2", f"--nproc-per-node={processes}", "--max-restarts=3"]
    words = entry_point("train.py", work / "c.json", f"run.dir={run_dir}")
    command = [warm_python.python(), "-m", "torch.distributed.run", *rendezvous, *nodes, *words]
    # torch 2.13 leaves the ranks' store with the first node otherwise, and tells nobody where it is in later rounds
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (work / f"said-{processes}").open("wb") as said:
        started = subprocess.Popen(command, stdout=said, stderr=said, cwd=work, env=env, start_new_session=True)
    warm_python.real_pid(started.pid)  # the next one is to have a higher process id
    return started


@pytest.mark.sweep  # torch's rendezvous misses nodes beside other work; in CI nodes of agents are killed
@pytest.mark.parametrize(("lost", "left"), [("first", 2), ("last", 2)])
def test_a_node_that_is_killed_is_done_without_and_the_curve_is_that_of_a_whole_run(
    work: Path, expected: dict[int, float], rendezvous_port: int, lost: str, left: int
) -> None:
    run_dir = work / lost
    # the node whose process came first has rank 0; torch sorts nodes by host and process id
    sizes = (1, 2) if lost == "first" else (2, 1)
    agents = [agent(work, run_dir, port=rendezvous_port, processes=size) for size in sizes]
    dead, alive = agents if lost == "first" else reversed(agents)
    said = work / f"said-{left}"
    try:
        # on busy cores a node may miss the first round: the other one begins alone, and starts again with it
        wait_until(lambda: last_step(run_dir) >= 12 and worlds(run_dir)[-1] == 3, process=alive, said=said.read_text)
        kill_all_of(dead)
        assert alive.wait(timeout=240) == 0, said.read_text()
    finally:
        kill_all_of(*agents)
    follows_whole_run(run_dir, expected)
    assert worlds(run_dir)[-2:] == [3, left]


@pytest.mark.sweep
def test_a_leaving_node_saves_and_others_go_on(work: Path, expected: dict[int, float], rendezvous_port: int) -> None:
    run_dir, said = work / "asked", work / "said-2"
    asked, left = (
        agent(work, run_dir, port=rendezvous_port, processes=size) for size in (1, 2)
    )  # the first has rank 0
    try:
        # on busy cores a node may miss the first round: the other one begins alone, and starts again with it
        wait_until(lambda: last_step(run_dir) >= 12 and worlds(run_dir)[-1] == 3, process=left, said=said.read_text)
        asked.terminate()
        assert left.wait(timeout=240) == 0, said.read_text()
    finally:
        kill_all_of(asked, left)
    follows_whole_run(run_dir, expected)
    assert worlds(run_dir)[-2:] == [3, 2]
    assert "stopped by SIGTERM after step" in (work / "said-1").read_text()


@pytest.mark.sweep
def test_a_worker_that_is_killed_is_started_again_by_the_same_torchrun(work: Path, expected: dict[int, float]) -> None:
    run_dir, said = work / "again", work / "said-again"
    command = warm_command("train.py", work / "c.json", f"run.dir={run_dir}", "engine=torch", processes=2)
    command.insert(command.index("--standalone"), "--max-restarts=1")
    with said.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=work, start_new_session=True)
    try:
        wait_until(lambda: last_step(run_dir) >= 12, process=process, said=said.read_text)
        os.kill(warm_python.descendants(process.pid)[-1], signal.SIGKILL)
        assert process.wait(timeout=240) == 0, said.read_text()
    finally:
        kill_all_of(process)
    follows_whole_run(run_dir, expected)
    assert worlds(run_dir) == [2, 2]


def follows_whole_run(run_dir: Path, expected: dict[int, float]) -> None:
    """Asserts that a journal has every step once, with the losses of a run that nobody stopped."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(expected)
    for step, loss in losses(run_dir).items():
        assert loss == pytest.approx(expected[step], rel=FP32), step


def worlds(run_dir: Path) -> list[int]:
    """How many processes each start of a run had."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["world_size"] for row in rows if row.get("event") in ("started", "resumed")]


def kill_all_of(*agents: subprocess.Popen[bytes]) -> None:
    """SIGKILL to agents and all that they have started: workers have sessions of their own."""
    for each in agents:
        family = [each.pid, *warm_python.descendants(each.pid)]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        each.wait()


def test_a_run_that_has_begun_goes_on_with_processes_that_do_not_divide_its_batch(
    tokens: Path, expected: dict[int, float], tmp_path: Path
) -> None:
    path = write_config(tmp_path / "c.json", forty_steps(tokens, tmp_path / "run"))
    assert "use 6 or 12" in refusal_of(start("train.py", path, processes=3))
    assert not (tmp_path / "run").exists()
    launch("train.py", path, "engine=torch", processes=2)
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000040")
    said = launch("train.py", path, processes=3)
    assert "resuming after step 35" in said
    assert "x dp 3 less 1 of 9 rows, which are padding (adjusted: train_micro_batch_size_per_gpu 2)" in said
    follows_whole_run(tmp_path / "run", expected)


TWO_OF_THREE = ("engine=torch", "parallel.tp=2", "run.steps=2", "scheduler.type=WarmupLR", "scheduler.params={}")


def test_a_process_without_a_place_waits_for_the_others_and_ends_well(work: Path) -> None:
    command = warm_command("train.py", work / "c.json", *TWO_OF_THREE, "run.dir=spare", processes=3)
    done = subprocess.run(command, capture_output=True, text=True, cwd=work, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rank 2 is spare: the layout takes 2 of 3 processes" in done.stderr
    assert "tp 2; 1 spare process" in done.stdout + done.stderr
    assert list(losses(work / "spare")) == [1, 2]


def test_nproc_starts_no_process_without_a_place(work: Path) -> None:
    command = warm_command("train.py", work / "c.json", *TWO_OF_THREE, "run.dir=nproc", processes=1)
    done = subprocess.run(
        [*command, "--nproc", "3"], capture_output=True, text=True, cwd=work, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "the layout takes 2 of 3 processes" in done.stderr
    assert "python --nproc: 2 processes" in done.stdout + done.stderr


STAND_BY = """
import sys
from pipeline.config.sections.run import LaunchSection
from pipeline.runtime.launch import Launch, wait_as_spare
launch = Launch(sys.argv[2], 2, 3, 2, f"127.0.0.1:{sys.argv[1]}")
wait_as_spare(launch, processes=2, config=LaunchSection(timeout=float(sys.argv[3])))
"""


HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def spare_process(port: int, *, launcher: str, timeout_s: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    """A spare process that has come to wait beside a store."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [warm_python.python(), "-c", STAND_BY, str(port), launcher, str(timeout_s)]
    spare = subprocess.Popen(command, cwd=ROOT, env=env, text=True, stderr=subprocess.PIPE)
    try:
        while "is spare" not in spare.stderr.readline():
            assert spare.poll() is None
        time.sleep(1.0)
        assert spare.poll() is None
        yield spare
    finally:
        spare.kill()
        spare.wait()


@pytest.mark.parametrize("how", ["over", "saved", "gone"])
def test_a_spare_process_leaves_with_those_that_train_and_not_before(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    rendezvous, store = open_rendezvous(Launch("srun", 0, 1, 0, f"127.0.0.1:{port}"), 60.0)
    with spare_process(port, launcher="srun") as spare:
        spare.terminate()  # leaving now, it would have `srun --wait` kill those that still save themselves
        time.sleep(1.5)
        assert spare.poll() is None
        if how == "over":
            store.underlying_store.set(RUN_FINISHED, "1")
        elif how == "saved":
            rendezvous.set_flag(RUN_STOPPED)
        else:
            del rendezvous, store
        assert spare.wait(timeout=300) == 0


def test_a_spare_process_of_torchrun_leaves_at_once_when_it_is_asked_to(rendezvous_port: int) -> None:
    with spare_process(rendezvous_port, launcher="torchrun") as spare:
        spare.terminate()
        assert spare.wait(timeout=300) == 0


def test_a_rank_0_that_is_silent_for_less_than_the_timeout_is_no_end_to_a_spare_process() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([warm_python.python(), "-c", HOST], text=True, stdin=pipe, stdout=pipe) as host:
        try:
            with spare_process(int(host.stdout.readline()), launcher="srun", timeout_s=7.0) as spare:
                os.kill(warm_python.real_pid(host.pid), signal.SIGSTOP)
                time.sleep(5.7)  # one question is given up after 5 s elsewhere
                assert spare.poll() is None
                assert spare.wait(timeout=300) == 0
                assert "rank 0 has not answered for 7 s" in spare.stderr.read()
        finally:
            host.kill()
