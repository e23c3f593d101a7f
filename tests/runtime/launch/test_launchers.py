"""The same config under every launcher of a single machine, with real processes. srun is in tests/test_slurm.py."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foundation.errors import EXIT_FOLLOWED, EXIT_LOST
from tests.conftest import ROOT, losses, tiny_config, write_config
from tests.support import alive, output_of, refusal_of, wait_until

TRAIN = str(ROOT / "pipeline/train.py")
STEPS = "run.steps=2"
WITHOUT_MPI = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (openmpi-bin)")


@pytest.fixture(scope="module")
def work(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with c.json, a run of two steps on ZeRO-1."""
    work = tmp_path_factory.mktemp("launchers")
    config = tiny_config(tokens, work / "run", zero_optimization={"stage": 1}, evaluation={"samples": 2})
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    write_config(work / "c.json", config)
    return work


def run(work: Path, *command: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    pipe = subprocess.PIPE
    return subprocess.run(
        command, stdout=pipe, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False, cwd=work
    )


def train(work: Path, name: str, *command: str) -> str:
    """Trains under a launcher into work/NAME and returns the output."""
    return output_of(run(work, *command, TRAIN, "--config", "c.json", "--set", STEPS, "--set", f"run.dir={name}"))


@pytest.fixture(scope="module")
def expected(work: Path) -> dict[int, float]:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    output = train(work, "torchrun", *torchrun)
    assert "torchrun: 2 processes" in output
    assert "preflight: dp 2, all 2 ranks answer" in output
    return losses(work / "torchrun")


@WITHOUT_MPI
@pytest.mark.sweep
def test_mpirun_gives_the_same_losses_as_torchrun(work: Path, expected: dict[int, float]) -> None:
    output = train(work, "mpirun", "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable)
    assert "mpirun (Open MPI): 2 processes" in output
    assert losses(work / "mpirun") == pytest.approx(expected, rel=1e-6)


@WITHOUT_MPI
def test_a_refused_config_under_mpirun_is_reported_with_its_remedy_and_at_most_once_in_full(work: Path) -> None:
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable)
    done = run(work, *mpirun, TRAIN, "--config", "c.json", "--set", "train_batch_size=9")
    assert done.returncode == 2
    assert done.stdout.count("\n  try: use 8 or 12") <= 1
    assert "try: use 8 or 12" in done.stdout  # mpirun may end rank 0 first


def test_nproc_gives_the_same_losses_as_torchrun_and_only_rank_0_prints(work: Path, expected: dict[int, float]) -> None:
    said = output_of(run(work, sys.executable, TRAIN, "--config", "c.json", "--nproc", "2", "--set", STEPS))
    assert said.count("python --nproc: 2 processes") == 1
    assert said.count("finished: 2 steps") == 1
    assert losses(work / "run") == pytest.approx(expected, rel=1e-6)


def test_a_refused_config_with_nproc_is_reported_once_and_starts_no_rank(work: Path) -> None:
    started = time.monotonic()
    done = run(work, sys.executable, TRAIN, "--nproc=2", "--config", "c.json", "--set", "train_batch_size=9")
    assert done.returncode == 2
    assert done.stdout.count("error:") == 1
    assert "use 8 or 12" in done.stdout
    # importing torch alone takes longer than this on a busy machine
    assert time.monotonic() - started < 60


def test_an_error_of_every_rank_is_printed_once(work: Path) -> None:
    sets = ("--set", "data.sources.0.path=nowhere")
    done = run(work, sys.executable, TRAIN, "--nproc", "2", "--config", "c.json", *sets)
    assert done.returncode == 2
    assert done.stdout.count("no such directory") == 1


def test_nproc_under_another_launcher_is_refused(work: Path) -> None:
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, TRAIN, "--nproc", "2", "--config", "c.json"]
    said = refusal_of(subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=work))
    assert "started by environment already" in said
    assert "unset RANK WORLD_SIZE" in said  # and with them unset it starts: every other test here


# A rank script without torch, to test what the supervisor does with it.
RANK = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from foundation.cli import guarded, leave
from foundation.errors import EXIT_FOLLOWED, LostError, TrainingError
rank, mode = int(os.environ["RANK"]), sys.argv[1]
print("rank", rank, "prints", flush=True)
if mode == "usr1":
    signal.signal(signal.SIGUSR1, lambda *_: leave(0))
open(f"pid-{{rank}}", "w").write(str(os.getpid()))
def main():
    if mode == "raise" and rank == 1:
        raise ValueError("the real cause")
    if mode == "raise":
        while not os.path.exists("pid-1") or os.path.exists("/proc/" + (open("pid-1").read() or "self")):
            time.sleep(0.1)
        raise RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    if mode == "refuse":
        raise TrainingError("all raise this")
    if mode == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            raise ValueError("the real cause")
    if mode == "exit":
        return 7 if rank == 1 else 0
    if mode in ("slow cause", "no cause") and rank > 0:
        return EXIT_FOLLOWED
    if mode == "slow cause":
        time.sleep(3.0)
        raise ValueError("the real cause")
    if mode == "stop" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "stop":
        time.sleep(1.0)
        raise LostError("rank 1 did not answer")
    if mode != "fine":
        time.sleep(600)
leave(guarded(main))
"""
SUPERVISE = """
import sys
sys.path.insert(0, {root!r})
from pipeline.runtime.launch import local, supervise
if sys.argv[1] == "no cause":
    local.OWN_ERROR_S = -local._GRACE_S + 1.0
if sys.argv[1] == "stop":
    local._GRACE_S = 300.0
sys.exit(supervise([sys.executable, "rank.py", sys.argv[1]], processes=3))
"""


def supervised(work: Path, mode: str) -> subprocess.Popen[str]:
    (work / "rank.py").write_text(RANK.format(root=str(ROOT)))
    (work / "supervise.py").write_text(SUPERVISE.format(root=str(ROOT)))
    command = [sys.executable, "supervise.py", mode]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=work)


def exited(process: subprocess.Popen[str], *, within_s: float) -> str:
    output, _ = process.communicate(timeout=within_s)
    return output


def pids(work: Path) -> list[int]:
    """The ranks' process ids, once all three have written them."""
    files = [work / f"pid-{rank}" for rank in range(3)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("fine", 0, "^rank 0 prints\n$"),
        ("refuse", 2, "^(?!.*all raise this.*all raise this).*all raise this"),  # all ranks raise it: printed once
        ("exit", 7, ""),
        ("slow cause", 1, "ValueError: the real cause"),  # waited for, though the ranks that follow it exit first
    ],
)
def test_the_exit_code_is_the_first_failed_ranks_and_its_output_is_printed_once(
    tmp_path: Path, fault: str, code: int, words: str
) -> None:
    process = supervised(tmp_path, fault)
    output = exited(process, within_s=200)
    assert process.returncode == code, output
    assert re.search(words, output, re.DOTALL), output


def test_the_first_failure_is_printed_once_and_secondary_errors_are_not(tmp_path: Path) -> None:
    process = supervised(tmp_path, "raise")
    output = exited(process, within_s=200)
    assert process.returncode == 1
    assert output.count("ValueError: the real cause") == 1
    assert "rank 1 of 3 failed" in output
    assert "closed by peer" not in output


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    process = supervised(tmp_path, "kill")
    assert "rank 1 of 3 was ended by SIGKILL" in exited(process, within_s=200)
    assert process.returncode == 128 + 9
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    process = supervised(tmp_path, "stubborn")
    # 1 s to collect other failures, 5 s until SIGKILL; the rest is for a busy machine
    assert "the real cause" in exited(process, within_s=200)
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_ranks_that_only_followed_an_error_are_not_reported_as_a_lost_rank(tmp_path: Path) -> None:
    process = supervised(tmp_path, "no cause")
    output = exited(process, within_s=200)
    assert process.returncode == EXIT_FOLLOWED, output
    assert re.search(r"ranks? 0(, 2)? of 3 did not exit", output)  # rank 2 may take its time on a busy machine
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_stopped_rank_is_not_waited_for(tmp_path: Path) -> None:
    process = supervised(tmp_path, "stop")
    ranks = pids(tmp_path)
    output = exited(process, within_s=200)  # SIGTERM first would take 300 s
    assert process.returncode == EXIT_LOST
    assert output.count("rank 1 did not answer") == 1
    assert not any(alive(pid) for pid in ranks)


@pytest.mark.parametrize(
    ("mode", "number", "code"),
    [("wait", signal.SIGINT, 130), ("usr1", signal.SIGUSR1, 0)],
    ids=["Ctrl-C", "stop signal"],
)
def test_a_signal_reaches_and_ends_all_ranks(tmp_path: Path, mode: str, number: signal.Signals, code: int) -> None:
    process = supervised(tmp_path, mode)
    ranks = pids(tmp_path)
    time.sleep(0.3)
    process.send_signal(number)
    exited(process, within_s=200)
    assert process.returncode == code
    assert not any(alive(pid) for pid in ranks)


def test_no_rank_survives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    process = supervised(tmp_path, "wait")
    ranks = pids(tmp_path)
    process.kill()
    process.wait()
    wait_until(lambda: not any(alive(pid) for pid in ranks))
