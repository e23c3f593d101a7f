"""The same config under every launcher of one machine, with real processes. srun is in tests/test_slurm.py."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.base.errors import EXIT_FOLLOWED, EXIT_LOST
from tests.conftest import ROOT, losses, tiny_config, write_config

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
    """Runs a command to its end; stdout and stderr as one text."""
    pipe = subprocess.PIPE
    return subprocess.run(
        command, stdout=pipe, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False, cwd=work
    )


def trained(work: Path, name: str, *command: str) -> str:
    """Trains under a launcher into work/NAME and returns what was said."""
    done = run(work, *command, TRAIN, "--config", "c.json", "--set", STEPS, "--set", f"run.dir={name}")
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def expected(work: Path) -> dict[int, float]:
    """The losses under torchrun."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    said = trained(work, "torchrun", *torchrun)
    assert "torchrun: 2 processes" in said
    assert "preflight: dp 2, all 2 ranks answer" in said
    return losses(work / "torchrun")


@WITHOUT_MPI
def test_mpirun_trains_the_same(work: Path, expected: dict[int, float]) -> None:
    said = trained(work, "mpirun", "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable)
    assert "mpirun (Open MPI): 2 processes" in said
    assert losses(work / "mpirun") == pytest.approx(expected, rel=1e-6)


@WITHOUT_MPI
def test_mpirun_on_a_refused_config_tells_it_once_in_full(work: Path) -> None:
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable)
    done = run(work, *mpirun, TRAIN, "--config", "c.json", "--set", "train_batch_size=9")
    assert done.returncode == 2
    assert done.stdout.count("  try: use 8 or 12") == 1


def test_nproc_trains_the_same_and_only_rank_0_speaks(work: Path, expected: dict[int, float]) -> None:
    done = run(work, sys.executable, TRAIN, "--config", "c.json", "--nproc", "2", "--set", STEPS)
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("python --nproc: 2 processes") == 1
    assert done.stdout.count("finished: 2 steps") == 1
    assert losses(work / "run") == pytest.approx(expected, rel=1e-6)


def test_nproc_on_a_refused_config_starts_nothing_and_tells_it_once(work: Path) -> None:
    started = time.monotonic()
    done = run(work, sys.executable, TRAIN, "--nproc=2", "--config", "c.json", "--set", "train_batch_size=9")
    assert done.returncode == 2
    assert done.stdout.count("error:") == 1
    assert "use 8 or 12" in done.stdout
    # importing torch alone takes longer than this on a busy machine
    assert time.monotonic() - started < 60


def test_what_every_rank_refuses_is_told_once(work: Path) -> None:
    sets = ("--set", "data.sources.0.path=nowhere")
    done = run(work, sys.executable, TRAIN, "--nproc", "2", "--config", "c.json", *sets)
    assert done.returncode == 2
    assert done.stdout.count("no such directory") == 1


def test_nproc_under_another_launcher_is_refused(work: Path) -> None:
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, TRAIN, "--nproc", "2", "--config", "c.json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=work)
    assert done.returncode == 2
    assert "started by environment already" in done.stderr


# A rank script without torch: what the supervisor does with it is what is tested.
RANK = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from headrace.base.cli import guarded, leave
from headrace.base.errors import EXIT_FOLLOWED, LostError, TrainingError
rank, how = int(os.environ["RANK"]), sys.argv[1]
print("rank", rank, "speaks", flush=True)
if how == "usr1":
    signal.signal(signal.SIGUSR1, lambda *_: leave(0))
open(f"pid-{{rank}}", "w").write(str(os.getpid()))
def main():
    if how == "raise" and rank == 1:
        raise ValueError("the real cause")
    if how == "raise":
        time.sleep(0.3)
        raise RuntimeError("Connection closed by peer")
    if how == "refuse":
        raise TrainingError("all say this")
    if how == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            raise ValueError("the real cause")
    if how == "exit":
        return 7 if rank == 1 else 0
    if how in ("slow cause", "no cause") and rank > 0:
        return EXIT_FOLLOWED
    if how == "slow cause":
        time.sleep(3.0)
        raise ValueError("the real cause")
    if how == "stop" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "stop":
        time.sleep(1.0)
        raise LostError("rank 1 did not answer")
    if how != "fine":
        time.sleep(600)
leave(guarded(main))
"""
SUPERVISE = """
import sys
sys.path.insert(0, {root!r})
from pipeline.launch import local, supervise
if sys.argv[1] == "no cause":
    local.INSIST_S = -local._GRACE_S + 1.0
sys.exit(supervise([sys.executable, "rank.py", sys.argv[1]], processes=3))
"""


def supervised(work: Path, how: str) -> subprocess.Popen[str]:
    """Starts three ranks that behave as `how` says."""
    (work / "rank.py").write_text(RANK.format(root=str(ROOT)))
    (work / "supervise.py").write_text(SUPERVISE.format(root=str(ROOT)))
    command = [sys.executable, "supervise.py", how]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=work)


def ended(process: subprocess.Popen[str], *, within_s: float) -> str:
    """What it said until its end."""
    said, _ = process.communicate(timeout=within_s)
    return said


def pids(work: Path) -> list[int]:
    """The ranks' process ids, once all three have told them."""
    deadline = time.monotonic() + 30
    files = [work / f"pid-{rank}" for rank in range(3)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def alive(pid: int) -> bool:
    """Whether a process still runs; one that is dead and not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_all_ranks_run_and_rank_0_alone_is_heard(tmp_path: Path) -> None:
    process = supervised(tmp_path, "fine")
    assert ended(process, within_s=30) == "rank 0 speaks\n"
    assert process.returncode == 0


def test_the_first_failure_is_shown_once_and_what_follows_from_it_is_not(tmp_path: Path) -> None:
    process = supervised(tmp_path, "raise")
    said = ended(process, within_s=30)
    assert process.returncode == 1
    assert said.count("ValueError: the real cause") == 1
    assert "rank 1 of 3 failed" in said
    assert "closed by peer" not in said


def test_an_error_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    process = supervised(tmp_path, "refuse")
    assert ended(process, within_s=30).count("all say this") == 1
    assert process.returncode == 2


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    process = supervised(tmp_path, "kill")
    assert "rank 1 of 3 was ended by SIGKILL" in ended(process, within_s=30)
    assert process.returncode == 128 + 9
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_an_exit_code_is_handed_on(tmp_path: Path) -> None:
    process = supervised(tmp_path, "exit")
    ended(process, within_s=30)
    assert process.returncode == 7


def test_a_rank_that_does_not_listen_is_ended_all_the_same(tmp_path: Path) -> None:
    process = supervised(tmp_path, "stubborn")
    # 1 s to see who else fails, 5 s of patience; the rest is for a busy machine
    assert "the real cause" in ended(process, within_s=30)
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_whoever_followed_an_error_is_done_first_and_the_error_is_waited_for(tmp_path: Path) -> None:
    process = supervised(tmp_path, "slow cause")
    said = ended(process, within_s=30)
    assert process.returncode == 1, said
    assert "ValueError: the real cause" in said


def test_ranks_that_only_followed_make_no_loss(tmp_path: Path) -> None:
    process = supervised(tmp_path, "no cause")
    said = ended(process, within_s=30)
    assert process.returncode == EXIT_FOLLOWED, said
    assert "rank 0 of 3 did not end" in said
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_stopped_rank_is_not_waited_for(tmp_path: Path) -> None:
    process = supervised(tmp_path, "stop")
    ranks = pids(tmp_path)
    began = time.monotonic()
    said = ended(process, within_s=30)
    # 1 s until the others say so, 1 s to see who else fails; to be asked to end takes another 5
    assert time.monotonic() - began < 5
    assert process.returncode == EXIT_LOST
    assert said.count("rank 1 did not answer") == 1
    assert not any(alive(pid) for pid in ranks)


def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    process = supervised(tmp_path, "wait")
    ranks = pids(tmp_path)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    ended(process, within_s=30)
    assert process.returncode == 130
    assert not any(alive(pid) for pid in ranks)


def test_a_signal_that_asks_for_something_reaches_every_rank(tmp_path: Path) -> None:
    process = supervised(tmp_path, "usr1")
    pids(tmp_path)
    time.sleep(0.3)
    process.send_signal(signal.SIGUSR1)
    ended(process, within_s=30)
    assert process.returncode == 0


def test_when_the_starter_is_killed_no_rank_is_left(tmp_path: Path) -> None:
    process = supervised(tmp_path, "wait")
    ranks = pids(tmp_path)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in ranks)
