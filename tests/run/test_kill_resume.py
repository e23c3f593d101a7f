"""Law 6 in training: a run that is killed at any moment goes on as if nothing had happened."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foundation.directory import read_manifest, verify
from pipeline.runtime.launch.group import free_port
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import ROOT, command_line, launch, losses, start, tiny_config, write_config
from tests.support import flip_a_byte, kill_group, last_step, refusal_of, wait_until


def deepspeed(config: Path, *sets: str) -> list[str]:
    """The command of the README, on two processes of this machine."""
    overrides = [word for text in sets for word in ("--set", text)]
    launcher = [
        str(Path(sys.executable).parent / "deepspeed"),
        "--num_accelerators",
        "2",
        "--master_port",
        str(free_port()),
    ]
    return [*launcher, str(ROOT / "pipeline/train.py"), "--config", str(config), *overrides]


def kill_at_step(command: list[str], run_dir: Path, step: int) -> None:
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=run_dir.parent
    )
    wait_until(lambda: last_step(run_dir) >= step, process=process)
    kill_group(process)
    wait_until_unlocked(run_dir)


def wait_until_unlocked(run_dir: Path) -> None:
    """Launchers put ranks into sessions of their own; the last of them may take a moment to die."""
    subprocess.run(["pkill", "-9", "-f", str(run_dir)], check=False)
    while subprocess.run(["pgrep", "-f", str(run_dir)], check=False, capture_output=True).returncode == 0:
        time.sleep(0.05)


@pytest.fixture(scope="module")
def uninterrupted(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ZeRO-3 run on two processes that nobody touched."""
    work = tmp_path_factory.mktemp("whole")
    launch("train.py", write_config(work / "c.json", tiny_config(tokens, work / "run")), processes=2)
    return work / "run"


def test_a_run_killed_and_resumed_has_undisturbed_losses(uninterrupted: Path, tokens: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "c.json", tiny_config(tokens, run_dir))
    kill_at_step(deepspeed(config), run_dir, step=8)
    kill_at_step(deepspeed(config), run_dir, step=14)
    done = subprocess.run(deepspeed(config), check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "resuming after step 10" in done.stderr
    assert losses(run_dir) == losses(uninterrupted)  # to the last bit: the layout is the same
    names = [p.name for p in (run_dir / "checkpoints").glob("step-*")]
    assert sorted(names) == ["step-00000015", "step-00000020"]
    assert (run_dir / "checkpoints/latest").resolve().name == "step-00000020"
    for name in names:
        checkpoint = run_dir / "checkpoints" / name
        assert all(whole for _, whole in verify(checkpoint, read_manifest(checkpoint, kind="checkpoint")))


def copy_of(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    uninterrupted: Path, tokens: Path, tmp_path: Path
) -> None:
    run_dir = copy_of(uninterrupted, tmp_path)
    config = write_config(tmp_path / "c.json", tiny_config(tokens, run_dir))
    flip_a_byte(run_dir / "checkpoints/step-00000020/__0_0.distcp")
    said = launch("train.py", config, "engine=torch")
    assert "step-00000020 is damaged (__0_0.distcp" in said
    assert "resuming after step 15" in said
    for step, loss in losses(uninterrupted).items():
        assert losses(run_dir)[step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("lost", [False, True], ids=["all 2 checkpoints", "its checkpoints are gone"])
def test_a_run_whose_checkpoints_are_damaged_or_gone_does_not_start_over(
    uninterrupted: Path, tokens: Path, tmp_path: Path, lost: bool
) -> None:
    run_dir = copy_of(uninterrupted, tmp_path)
    config = write_config(tmp_path / "c.json", tiny_config(tokens, run_dir))
    for checkpoint in (run_dir / "checkpoints").glob("step-*"):
        flip_a_byte(checkpoint / "__1_0.distcp")
    if lost:
        shutil.rmtree(run_dir / "checkpoints")
    before = (run_dir / "metrics.jsonl").read_bytes()
    words = "its checkpoints are gone" if lost else "all 2 checkpoints"
    assert words in refusal_of(start("train.py", config, "engine=torch"))
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_started_again_changes_nothing(uninterrupted: Path, tokens: Path, tmp_path: Path) -> None:
    run_dir = copy_of(uninterrupted, tmp_path)
    config = write_config(tmp_path / "c.json", tiny_config(tokens, run_dir))
    launch("train.py", config, "engine=torch")
    assert losses(run_dir) == losses(uninterrupted)


def test_two_processes_cannot_train_in_one_directory(tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    long = command_line("train.py", config, "run.steps=100000", processes=1)
    first = subprocess.Popen(long, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until((tmp_path / "run/metrics.jsonl").exists, process=first)
        assert "another process is training there" in refusal_of(start("train.py", config, "run.steps=100000"))
    finally:
        first.kill()
        first.wait()


def test_ctrl_c_while_checkpoints_are_written_leaves_whole_ones(tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    long = command_line("train.py", config, "run.steps=100000", "run.checkpoint_every=1", processes=1)
    process = subprocess.Popen(long, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until((tmp_path / "run/checkpoints").exists, process=process)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "stopped by SIGINT" in said
    assert "Traceback" not in said
    found = list((tmp_path / "run/checkpoints").glob("step-*"))
    assert max(found).name == f"step-{max(losses(tmp_path / 'run')):08d}"
    for checkpoint in found:
        assert all(whole for _, whole in verify(checkpoint, read_manifest(checkpoint, kind="checkpoint")))


def test_a_field_that_alters_the_curve_changes_if_named(uninterrupted: Path, tokens: Path, tmp_path: Path) -> None:
    run_dir = copy_of(uninterrupted, tmp_path)
    config = write_config(tmp_path / "c.json", tiny_config(tokens, run_dir))
    changed = ("engine=torch", "run.steps=22", "optimizer.params.lr=0.001")
    assert 'run.allow_change: ["optimizer.params.lr"' in refusal_of(start("train.py", config, *changed))
    said = refusal_of(start("train.py", config, *changed, 'run.allow_change=["optimiser"]'))
    assert "did you mean 'optimizer'?" in said
    launch("train.py", config, *changed, 'run.allow_change=["optimizer", "scheduler"]')
    events = {row["event"]: row for row in read_rows(run_dir, kind="event")}
    assert ["optimizer.params.lr", 0.003, 0.001] in events["changed"]["fields"]
    assert sorted(losses(run_dir)) == list(range(1, 23))
