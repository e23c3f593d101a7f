"""Law 6 for asynchronous checkpoints: a snapshot of the state at `begin`, committed atomically, one save at a time."""

from __future__ import annotations

import os
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
from torch.multiprocessing.reductions import StorageWeakRef

from foundation.directory import read_manifest, verify
from foundation.errors import CheckpointError
from pipeline.checkpoint import named_state, save
from pipeline.checkpoint.checkpoint import CheckpointInfo
from pipeline.checkpoint.export.read_weights import CheckpointWeights
from pipeline.checkpoint.format.naming import finished_checkpoints
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.save import CheckpointWriter, SaveResult, save_streamed
from pipeline.checkpoint.store import CheckpointStore
from pipeline.checkpoint.write.streamed import LazyTensor
from pipeline.checkpoint.write.write_shards import WrittenShards
from pipeline.runtime.metrics.journal import Journal, read_rows
from tests.conftest import room_for
from tests.engines.parallel.ranks import WORLD, Ranks

ROWS = 64
KEY = named_state.weight_key("w")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(str(tmp_path_factory.mktemp("world")))
    yield ranks
    ranks.close()


def info(step: int) -> CheckpointInfo:
    return CheckpointInfo(step, {}, {}, {"step": step})


def state_of(tensor: torch.Tensor) -> dict[str, Any]:
    return {KEY: NamedShard(tuple(tensor.shape), start=0, values=tensor.view(-1))}


def stored(path: Path) -> torch.Tensor:
    return CheckpointWeights(path).value("w")


def finish(writer: CheckpointWriter) -> SaveResult:
    result = writer.wait()
    assert result is not None
    return result


def test_changes_after_begin_are_not_in_the_checkpoint(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointStore(tmp_path, keep=2))
    weights = torch.randn(4096, 1024)
    before = weights.clone()
    writer.begin(info(1), lambda: state_of(weights))
    weights.zero_()
    saved = finish(writer)
    assert torch.equal(stored(saved.checkpoint.path), before)
    manifest = saved.checkpoint.manifest
    assert all(good for _, good in verify(saved.checkpoint.path, manifest))
    assert {"__0_0.distcp", "metadata.npz"} == set(manifest.files)


def test_a_checkpoint_has_its_name_only_when_everything_is_written(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointStore(tmp_path, keep=2))
    writer.begin(info(1), lambda: state_of(torch.randn(1024, 1024)))
    while writer.busy:
        assert not list((tmp_path / "checkpoints").glob("step-*"))
        time.sleep(0.001)
    assert writer.pending
    assert writer.advance() is None  # written, and about to be committed
    assert finish(writer).checkpoint is not None
    assert (tmp_path / "checkpoints/latest").resolve() == tmp_path / "checkpoints/step-00000001"


def test_retention_keeps_the_newest_and_those_of_every_nth_step(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointStore(tmp_path, keep=2, keep_every=4))
    for step in range(1, 12):
        writer.begin(info(step), lambda: state_of(torch.ones(3)))
        finish(writer)
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert names == ["step-00000004", "step-00000008", "step-00000010", "step-00000011"]


@pytest.mark.parametrize("harm", ["truncated", "no manifest", "flipped bit"])
def test_a_damaged_checkpoint_takes_no_place_among_those_kept_and_protects_none(tmp_path: Path, harm: str) -> None:
    store = CheckpointStore(tmp_path, keep=2, keep_every=2)
    writer = CheckpointWriter(store)
    for step in (1, 2):
        writer.begin(info(step), lambda: state_of(torch.ones(3)))
        finish(writer)
    damaged = tmp_path / "checkpoints/step-00000002"
    shards = damaged / "__0_0.distcp"
    if harm == "truncated":
        os.truncate(shards, 10)
    elif harm == "no manifest":
        (damaged / "manifest.json").unlink()
    else:  # as many bytes as before: found where the run resumes, and remembered
        shards.write_bytes(bytes([shards.read_bytes()[0] ^ 1]) + shards.read_bytes()[1:])
        assert store.newest_intact(lambda _line: None).step == 1
    kept = []
    for step in (3, 5):
        writer.begin(info(step), lambda: state_of(torch.ones(3)))
        finish(writer)
        kept.append(sorted(int(path.name[-2:]) for path in (tmp_path / "checkpoints").glob("step-*")))
    assert kept == [[1, 2, 3], [3, 5]]  # 1 is kept until there are two good ones; the damaged 2 goes, though even


def test_no_checkpoint_is_committed_while_rows_of_its_steps_are_in_memory_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path, from_step=0)
    writer = CheckpointWriter(CheckpointStore(tmp_path, keep=2), before_commit=journal.require_written)
    journal.write("event", 0, text="longer than the files of a checkpoint" * 10_000)
    with room_for((tmp_path / "metrics.jsonl").stat().st_size + 10):
        journal.write("step", 1, loss=1.0)
        writer.begin(info(1), lambda: state_of(torch.ones(3)))
        assert "rows of" in (finish(writer).failure or "")
        assert finished_checkpoints(tmp_path) == []
        writer.begin(info(2), lambda: state_of(torch.ones(3)))
        while writer.busy:
            time.sleep(0.001)
    assert finish(writer).checkpoint is not None  # there is room again: the rows are written, then it is committed
    assert [row["step"] for row in read_rows(tmp_path, kind="step")] == [1]


def test_options_of_the_main_thread_stay_while_a_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    original = torch.save

    def save(*arguments: Any) -> None:
        assert not torch.serialization.get_crc32_options()  # in the writing thread
        time.sleep(0.2)
        original(*arguments)

    monkeypatch.setattr(torch, "save", save)
    writer = CheckpointWriter(CheckpointStore(tmp_path, keep=2))
    writer.begin(info(1), lambda: state_of(torch.ones(3)))
    while writer.busy:
        seen.append(torch.serialization.get_crc32_options())
        time.sleep(0.01)
    assert finish(writer).checkpoint is not None
    assert seen
    assert all(seen)


def test_a_file_of_many_tensors_is_written_with_memory_for_one(tmp_path: Path) -> None:
    made: list[StorageWeakRef] = []

    def read() -> torch.Tensor:
        assert all(each.expired() for each in made)
        value = torch.ones(4)
        made.append(StorageWeakRef(value.untyped_storage()))
        return value

    parts = {f"w{at}": LazyTensor((4,), torch.float32, read, part=lambda _rectangle: read()) for at in range(3)}
    save_streamed(CheckpointStore(tmp_path, keep=1), info(1), parts, lambda _done, _total: None)
    assert len(made) == 3


def test_buffers_follow_a_state_of_other_sizes(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointStore(tmp_path, keep=3))
    for step, rows in enumerate((3, 2, 4), start=1):
        weights = torch.randn(rows, 2)
        writer.begin(info(step), lambda weights=weights: state_of(weights))
        assert torch.equal(stored(finish(writer).checkpoint.path), weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_page_locked_memory_is_unlocked_before_it_is_reused(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointStore(tmp_path, keep=9))
    for step in range(1, 9):  # memory of 32 and 64 MB is mapped anew each time, often at the address of the last one
        weights = torch.randn(2**22 * (1 + step % 2), 2, device="cuda")
        writer.begin(info(step), lambda weights=weights: state_of(weights))
        saved = finish(writer)
        assert torch.equal(stored(saved.checkpoint.path), weights.cpu())
        assert len(writer._page_locked) == 1  # memory that is locked already cannot be locked again


def test_waiting_tolerates_files_renamed_or_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "_POLL_S", 0.0)
    staging, final = tmp_path / "staging", tmp_path / "final"

    def write_and_rename() -> None:
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            staging.mkdir()
            for number in range(30):
                (staging / f"__0_{number}.distcp").touch()
            staging.rename(final)
            shutil.rmtree(final)

    with ThreadPoolExecutor(1) as thread:
        CheckpointWriter(CheckpointStore(tmp_path, keep=2))._wait_for(thread.submit(write_and_rename), staging)


def limit_files(size: int) -> None:
    """Lets every write past a size fail, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def save_on_every_rank(rank: int, folder: str, limited: int | None) -> list[Any]:
    """Saves twice; one rank's disk is full the first time. Returns the failure, the files left, and a read check."""
    store = CheckpointStore(Path(folder), keep=2)
    writer = CheckpointWriter(store)
    rows = torch.arange(rank * ROWS * 512, (rank + 1) * ROWS * 512, dtype=torch.float32)

    def state() -> dict[str, Any]:
        return {KEY: NamedShard((WORLD * ROWS, 512), start=rank * ROWS * 512, values=rows), "same": torch.ones(1000)}

    if rank == limited:
        limit_files(10_000)
    writer.begin(info(1), state)
    first = finish(writer)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    remaining = sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
    dist.barrier()
    writer.begin(info(2), state)
    second = finish(writer)
    return [first.failure, remaining, reads_other_shard(second.checkpoint.path)]


def reads_other_shard(path: Path) -> bool:
    rank = dist.get_rank()
    values = torch.zeros(100)
    start = ((rank + 1) % WORLD) * ROWS * 512 + 77
    named_state.read({KEY: NamedShard((WORLD * ROWS, 512), start=start, values=values)}, path)
    return torch.equal(values, torch.arange(start, start + 100, dtype=torch.float32))


@pytest.mark.parametrize("limited", [None, 0, 2])
def test_a_rank_that_cannot_write_is_named_and_the_next_checkpoint_is_intact(
    world: Ranks, tmp_path: Path, limited: int | None
) -> None:
    results = world.run(save_on_every_rank, str(tmp_path), limited)
    for failure, remaining, read_ok in results:
        assert read_ok
        if limited is None:
            assert failure is None
            assert remaining == ["latest", "step-00000001"]
        else:
            assert f"rank {limited}" in failure
            assert "File too large" in failure
            assert remaining == []  # the staging directory is deleted
    manifest = read_manifest(tmp_path / "checkpoints/step-00000002", kind="checkpoint")
    assert all(good for _, good in verify(tmp_path / "checkpoints/step-00000002", manifest))


def save_in_changing_layouts(rank: int, folder: str) -> list[Any]:
    """Saves five times; returns for each whether locations were sent, and what is wrong with the values, if anything.

    Borders between the ranks' parts move, for some of the ranks; the fourth save lacks a part.
    """
    writer = CheckpointWriter(CheckpointStore(Path(folder), keep=9))
    sent: list[bool] = []
    original = writer._message

    def message(written: WrittenShards) -> WrittenShards:
        told = original(written)
        sent.append(told.locations is not None)
        return told

    writer._message = message  # type: ignore[method-assign]
    found: list[Any] = []
    layouts = ([0, 5, 9, 13, 40], [0, 5, 9, 13, 40], [0, 2, 9, 13, 40], [0, 2, 9, 13, 39], [0, 2, 9, 13, 40])
    for step, borders in enumerate(layouts, start=1):
        start, end = borders[rank], borders[rank + 1]
        values = torch.arange(start, end, dtype=torch.float32) + 100 * step
        state = {KEY: NamedShard((8, 5), start=start, values=values), f"only on {rank}": torch.full((3,), float(rank))}
        try:
            writer.begin(info(step), lambda state=state: state)
        except CheckpointError as error:
            found.append(str(error))
            continue
        saved = finish(writer)
        assert saved.checkpoint is not None
        whole, other = torch.zeros(40), torch.zeros(3)
        read = {KEY: NamedShard((8, 5), start=0, values=whole), f"only on {(rank + 1) % WORLD}": other}
        named_state.read(read, saved.checkpoint.path)
        good = torch.equal(whole, torch.arange(40.0) + 100 * step) and bool((other == (rank + 1) % WORLD).all())
        found.append((sent[-1], good))
    return found


def test_only_a_layout_that_changes_between_saves_is_planned_anew(world: Ranks, tmp_path: Path) -> None:
    for new, same, moved, incomplete, again in world.run(save_in_changing_layouts, str(tmp_path)):
        assert new == moved == again == (True, True)
        assert same == (False, True)
        assert "weight/w: 1 of 40 elements are in no shard" in incomplete


def written_bytes(rank: int, folder: str) -> int:
    """Bytes that a rank writes of a fully replicated state."""
    tensors = {named_state.weight_key(str(n)): torch.ones(1000) for n in range(40)}
    state = {key: NamedShard((1000,), start=0, values=value) for key, value in tensors.items()}
    named_state.write(state, Path(folder))
    return sum(path.stat().st_size for path in Path(folder).glob(f"__{rank}_*"))


def test_the_writing_of_replicas_is_divided_among_the_ranks(world: Ranks, tmp_path: Path) -> None:
    sizes = world.run(written_bytes, str(tmp_path))
    assert max(sizes) < 1.2 * min(sizes)
