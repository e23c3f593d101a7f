"""Law 6 beside the training: a checkpoint is what the state was when it began, whole or absent, and one at a time."""

from __future__ import annotations

import resource
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.base.directory import read_manifest, verify
from pipeline.checkpoint import named_state, save
from pipeline.checkpoint.save import CheckpointWriter, Saved
from pipeline.checkpoint.shards import NamedShard
from pipeline.checkpoint.store import CheckpointInfo, CheckpointStore
from tests.parallel.ranks import WORLD, Ranks

ROWS = 64
KEY = named_state.weight_key("w")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes with a gloo group."""
    ranks = Ranks(str(tmp_path_factory.mktemp("world")))
    yield ranks
    ranks.close()


def about(step: int) -> CheckpointInfo:
    return CheckpointInfo(step, {}, {}, {"step": step})


def whole_of(tensor: torch.Tensor) -> dict[str, Any]:
    return {KEY: NamedShard(tuple(tensor.shape), start=0, values=tensor.view(-1))}


def stored(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    return named_state.read_weight("w", torch.Size(shape), path)


def settled(writer: CheckpointWriter) -> Saved:
    saved = writer.wait()
    assert saved is not None
    return saved


def test_what_changes_after_the_beginning_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointStore(tmp_path, keep=2))
    weights = torch.randn(4096, 1024)
    before = weights.clone()
    writer.begin(about(1), lambda: whole_of(weights))
    weights.zero_()
    saved = settled(writer)
    assert saved.checkpoint is not None
    assert torch.equal(stored(saved.checkpoint.path, (4096, 1024)), before)
    manifest = saved.checkpoint.manifest
    assert all(good for _, good in verify(saved.checkpoint.path, manifest))
    assert {"__0_0.distcp", ".metadata"} == set(manifest.files)


def test_nothing_has_a_name_before_everything_is_written(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointStore(tmp_path, keep=2))
    writer.begin(about(1), lambda: whole_of(torch.randn(1024, 1024)))
    while writer.busy:
        assert not list((tmp_path / "checkpoints").glob("step-*"))
        time.sleep(0.001)
    assert writer.in_flight
    assert writer.settle() is None  # written, and about to be named
    assert settled(writer).checkpoint is not None
    assert (tmp_path / "checkpoints/latest").resolve() == tmp_path / "checkpoints/step-00000001"


def test_the_newest_stay_and_those_of_every_so_many_steps(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointStore(tmp_path, keep=2, keep_every=4))
    for step in range(1, 12):
        writer.begin(about(step), lambda: whole_of(torch.ones(3)))
        settled(writer)
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert names == ["step-00000004", "step-00000008", "step-00000010", "step-00000011"]


def test_a_state_of_other_sizes_has_its_own_values(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointStore(tmp_path, keep=3))
    for step, rows in enumerate((3, 2, 4), start=1):
        weights = torch.randn(rows, 2)
        writer.begin(about(step), lambda held=weights: whole_of(held))
        assert torch.equal(stored(settled(writer).checkpoint.path, (rows, 2)), weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_page_locked_memory_is_unlocked_before_others_get_it(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointStore(tmp_path, keep=9))
    for step in range(1, 9):  # memory of 32 and 64 MB is mapped anew each time, often where the last one was
        weights = torch.randn(2**22 * (1 + step % 2), 2, device="cuda")
        writer.begin(about(step), lambda held=weights: whole_of(held))
        saved = settled(writer)
        assert torch.equal(stored(saved.checkpoint.path, tuple(weights.shape)), weights.cpu())
        assert len(writer._locked) == 1  # a place that is locked already cannot be locked again


def test_files_that_get_their_name_or_are_deleted_meanwhile_do_not_disturb_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "_GLANCE_S", 0.0)
    folder, away = tmp_path / "staging", tmp_path / "final"

    def come_and_go() -> None:
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            folder.mkdir()
            for number in range(30):
                (folder / f"__0_{number}.distcp").touch()
            folder.rename(away)
            shutil.rmtree(away)

    with ThreadPoolExecutor(1) as thread:
        CheckpointWriter(CheckpointStore(tmp_path, keep=2))._wait_for(thread.submit(come_and_go), folder)


def limit_files(size: int) -> None:
    """Has every write past a size fail, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def save_on_every_rank(rank: int, folder: str, limited: int | None) -> list[Any]:
    """Saves twice; on one rank the disk is full the first time. Returns the failure, what is left, and what is read."""
    store = CheckpointStore(Path(folder), keep=2)
    writer = CheckpointWriter(store)
    rows = torch.arange(rank * ROWS * 512, (rank + 1) * ROWS * 512, dtype=torch.float32)

    def state() -> dict[str, Any]:
        return {KEY: NamedShard((WORLD * ROWS, 512), start=rank * ROWS * 512, values=rows), "same": torch.ones(1000)}

    if rank == limited:
        limit_files(10_000)
    writer.begin(about(1), state)
    first = settled(writer)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
    dist.barrier()
    writer.begin(about(2), state)
    second = settled(writer)
    assert second.checkpoint is not None
    return [first.failure, left, stored_by_all(second.checkpoint.path)]


def stored_by_all(path: Path) -> bool:
    """Whether another part of it than this rank wrote is right."""
    rank = dist.get_rank()
    values = torch.zeros(100)
    start = ((rank + 1) % WORLD) * ROWS * 512 + 77
    named_state.read({KEY: NamedShard((WORLD * ROWS, 512), start=start, values=values)}, path)
    return torch.equal(values, torch.arange(start, start + 100, dtype=torch.float32))


@pytest.mark.parametrize("limited", [None, 0, 2])
def test_a_rank_that_cannot_write_is_named_and_the_next_checkpoint_is_whole(
    world: Ranks, tmp_path: Path, limited: int | None
) -> None:
    answers = world.run(save_on_every_rank, str(tmp_path), limited)
    for failure, left, read in answers:
        assert read
        if limited is None:
            assert failure is None
            assert left == ["latest", "step-00000001"]
        else:
            assert f"rank {limited}" in failure
            assert "File too large" in failure
            assert left == []  # nothing is left that takes up room
    manifest = read_manifest(tmp_path / "checkpoints/step-00000002", kind="checkpoint")
    assert all(good for _, good in verify(tmp_path / "checkpoints/step-00000002", manifest))


def written_bytes(rank: int, folder: str) -> int:
    """What a rank writes of a state that all ranks hold whole."""
    tensors = {named_state.weight_key(str(n)): torch.ones(1000) for n in range(40)}
    state = {key: NamedShard((1000,), start=0, values=value) for key, value in tensors.items()}
    named_state.write(state, Path(folder))
    return sum(path.stat().st_size for path in Path(folder).glob(f"__{rank}_*"))


def test_replicas_are_dealt_out_among_the_ranks(world: Ranks, tmp_path: Path) -> None:
    sizes = world.run(written_bytes, str(tmp_path))
    assert max(sizes) < 1.2 * min(sizes)
