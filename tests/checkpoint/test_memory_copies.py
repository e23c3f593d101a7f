"""Copies of checkpoint files in host memory: made beside the save, one checkpoint at a time, never in its way."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.directory import sha256_of_file
from pipeline.checkpoint.memory import memory_copies
from pipeline.checkpoint.memory.memory_copies import MemoryCopies, room
from pipeline.checkpoint.memory.memory_folder import MemoryFolder, remove, remove_left_behind, used
from pipeline.checkpoint.save import CheckpointWriter, SaveResult
from pipeline.checkpoint.store import CheckpointStore
from pipeline.checkpoint.write.write_shards import write_shards
from tests.checkpoint.test_save import finish, info, state_of
from tests.support import wait_until

STATE = state_of(torch.randn(256, 256))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MemoryFolder]:
    """The folder of a run, in use."""
    (tmp_path / "shm").mkdir()
    folder = MemoryFolder.of(str(tmp_path / "shm"), tmp_path / "run")
    with used(folder):
        yield folder


def writer_of(memory: MemoryFolder, *, background: bool = True) -> CheckpointWriter:
    store = CheckpointStore(memory.run_dir, keep=2)
    return CheckpointWriter(store, background=background, copies=MemoryCopies(memory, rank=0, ranks_here=1))


def save(writer: CheckpointWriter, step: int, state: dict[str, Any] = STATE) -> SaveResult:
    writer.begin(info(step), lambda: state)
    return finish(writer)


def copied(memory: MemoryFolder) -> dict[str, str]:
    """Step/file -> checksum of all that is in the folder."""
    files = (path for path in memory.path.rglob("*") if path.is_file() and path.name != "run")
    return {str(path.relative_to(memory.path)): sha256_of_file(path) for path in files}


@pytest.mark.parametrize("background", [True, False])
def test_the_newest_checkpoint_is_copied_and_the_one_before_is_removed(memory: MemoryFolder, background: bool) -> None:
    writer = writer_of(memory, background=background)
    for step in (1, 2, 3):
        weights = torch.randn(256, 256)
        writer.begin(info(step), lambda weights=weights: state_of(weights))  # type: ignore[misc]
        weights.zero_()
        result = finish(writer)
        writer.wait_for_copy()
        wanted = result.checkpoint.manifest.files["__0_0.distcp"]["sha256"]
        assert copied(memory) == {f"step-{step:08d}/__0_0.distcp": wanted}
        assert not result.not_copied


def steps_of(memory: MemoryFolder) -> set[int]:
    return {int(name.partition("/")[0].removeprefix("step-")) for name in copied(memory)}


def begin_second(writer: CheckpointWriter) -> None:
    """Writes the files of step 2 and its copy, without the commit."""
    writer.begin(info(2), lambda: STATE)
    wait_until(lambda: not writer.busy)
    writer.wait_for_copy()


def test_the_copy_before_stays_until_the_newer_checkpoint_is_complete(memory: MemoryFolder) -> None:
    writer = writer_of(memory)
    save(writer, 1)
    writer.wait_for_copy()
    begin_second(writer)
    assert steps_of(memory) == {1, 2}
    finish(writer)
    assert steps_of(memory) == {2}


def test_a_failed_save_leaves_no_copy_and_keeps_the_last(memory: MemoryFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(memory)
    save(writer, 1)
    writer.wait_for_copy()

    def full(*_args: object, **_named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "commit", full)
    assert save(writer, 2).checkpoint is None
    assert steps_of(memory) == {1}


def test_the_next_save_does_not_wait_for_a_copy(memory: MemoryFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    real = write_shards

    def slow(plan: Any, lookup: Any, directory: Path) -> Any:
        def value(item: Any) -> Any:
            for _ in range(1000):
                time.sleep(0.1)
                lookup(item)  # raises once the copy is given up
            return lookup(item)

        return real(plan, value, directory)

    monkeypatch.setattr(memory_copies, "write_shards", slow)
    writer = writer_of(memory)
    assert save(writer, 1).checkpoint is not None  # a checkpoint is complete without its copy
    began = time.monotonic()
    second = save(writer, 2)
    assert second.checkpoint is not None
    assert time.monotonic() - began < 50  # the copy takes 100 s
    assert second.not_copied == {0: "the copy was not finished when the next checkpoint began"}
    writer.stop_copy()
    assert copied(memory) == {}


def test_without_room_nothing_is_copied_which_is_told(memory: MemoryFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_copies, "room", lambda _path: 1000)
    result = save(writer_of(memory), 1)
    assert result.checkpoint is not None
    assert "are free for them" in result.not_copied[0]
    assert copied(memory) == {}


def test_with_room_for_one_the_old_copy_is_removed_first(memory: MemoryFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(memory)
    save(writer, 1)
    writer.wait_for_copy()
    monkeypatch.setattr(memory_copies, "room", lambda _path: 1000)
    begin_second(writer)
    assert steps_of(memory) == {2}  # before the commit
    assert not finish(writer).not_copied


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A real tmpfs of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        os.getuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("mounting a tmpfs takes root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_tmpfs_costs_the_copy_alone(small_tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryFolder.of(str(small_tmpfs), tmp_path / "run")
    with used(memory):
        assert room(memory.path) < 1 << 20
        large = state_of(torch.randn(512, 1024))  # 2 MB
        writer = writer_of(memory)
        result = save(writer, 1, large)
        assert result.checkpoint is not None
        assert "GB of" in result.not_copied[0]
        monkeypatch.setattr(memory_copies, "room", lambda _path: 1 << 30)  # another program fills it after the look
        second = save(writer, 2, large)
        writer.wait_for_copy()
        assert copied(memory) == {}
        third = save(writer, 3, large)
        assert None not in (second.checkpoint, third.checkpoint)
        assert "No space left" in {**third.not_copied, **second.not_copied}[0]  # reported by the save or by the next
        writer.wait_for_copy()  # it uses the folder


def test_the_limit_and_the_usage_of_every_cgroup_above_count(tmp_path: Path) -> None:
    outer, inner = tmp_path / "job", tmp_path / "job/step"
    inner.mkdir(parents=True)
    for folder, limit, current in ((outer, "1000", 500), (inner, "max", 400)):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(current))
        (folder / "memory.stat").write_text("anon 300\ninactive_file 100\n")
    assert list(memory_copies._of_cgroups("0::/job/step\n", tmp_path)) == [500 + 100 - 100]
    old = tmp_path / "memory/job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("2000")
    (old / "memory.usage_in_bytes").write_text("1500")
    (old / "memory.stat").write_text("total_inactive_file 300\n")
    assert list(memory_copies._of_cgroups("4:memory:/job\n", tmp_path)) == [500 + 300 - 200]


def test_the_folder_is_of_this_user_alone(memory: MemoryFolder) -> None:
    assert memory.root.stat().st_mode & 0o777 == 0o700
    memory.root.chmod(0o755)
    with pytest.raises(PermissionError, match="this user alone"), used(memory):
        pass


def test_the_last_process_that_uses_a_folder_removes_it(tmp_path: Path) -> None:
    memory = MemoryFolder.of(str(tmp_path), tmp_path / "run")
    with used(memory):
        with used(memory):
            pass
        assert not remove(memory)
        assert memory.path.is_dir()
    assert remove(memory)
    assert not memory.root.exists()


def test_what_a_dead_run_has_left_is_removed_by_the_next_run_on_the_node(memory: MemoryFolder, tmp_path: Path) -> None:
    dead, alive, young = (
        MemoryFolder.of(str(tmp_path / "shm"), tmp_path / name) for name in ("dead", "alive", "young")
    )
    for other in (dead, young):
        with used(other):
            other.folder(3).mkdir()
    with used(alive):
        for other in (dead, alive):
            for path in (other.path, other.root / f"{other.name}.used"):
                os.utime(path, (time.time() - 7200,) * 2)
        assert remove_left_behind(memory) == [str(dead.run_dir)]
        assert not dead.path.exists()
        assert alive.path.is_dir()
        assert young.path.is_dir()
