"""A restart reads a node's files from its memory, lost ones from the run's directory, and finds damage in both.

Four processes; those with the same folder are on one "node". What is read is counted, and files that must not be read
are not there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.errors import CheckpointError
from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.memory import memory_server
from pipeline.checkpoint.memory.memory_copies import MemoryCopies
from pipeline.checkpoint.memory.memory_folder import MemoryFolder, used
from pipeline.checkpoint.memory.restart_files import RestartFiles
from pipeline.checkpoint.save import CheckpointWriter
from pipeline.checkpoint.store import CheckpointStore
from tests.checkpoint.test_save import info
from tests.engines.parallel.ranks import WORLD, Ranks
from tests.support import flip_a_byte

ROWS, COLUMNS = 64, 512
KEY = named_state.weight_key("w")
TWO_NODES = (0, 0, 1, 1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(str(tmp_path_factory.mktemp("world")))
    yield ranks
    ranks.close()


def values(step: int) -> torch.Tensor:
    return torch.randn(WORLD * ROWS, COLUMNS, generator=torch.Generator().manual_seed(step))


def memory_of(work: Path, node: int) -> MemoryFolder:
    (work / f"node{node}").mkdir(exist_ok=True)
    return MemoryFolder.of(str(work / f"node{node}"), work / "run")


def save(rank: int, work: Path, nodes: tuple[int, ...], steps: tuple[int, ...]) -> None:
    memory = memory_of(work, nodes[rank])
    with used(memory):
        copies = MemoryCopies(memory, rank=rank, ranks_here=nodes.count(nodes[rank]))
        writer = CheckpointWriter(CheckpointStore(work / "run", keep=3), copies=copies)
        for step in steps:
            mine = values(step)[rank * ROWS : (rank + 1) * ROWS]
            shard = NamedShard((WORLD * ROWS, COLUMNS), start=rank * ROWS * COLUMNS, values=mine.reshape(-1))
            writer.begin(info(step), lambda shard=shard: {KEY: shard})  # type: ignore[misc]
            result = writer.wait()
            assert result.checkpoint is not None
            assert not result.not_copied
            writer.wait_for_copy()


def resume(rank: int, work: Path, nodes: tuple[int, ...], whole: bool) -> tuple[int, dict[str, int], list[str]]:
    """Reads this rank's rows, or all as another layout does: the step, the bytes of all ranks, their warnings."""
    memory = memory_of(work, nodes[rank])
    with used(memory):
        files = RestartFiles(memory)
        newest = CheckpointStore(work / "run", keep=3).newest_intact(lambda _line: None, files=files)
        assert newest is not None
        first, last = (0, WORLD * ROWS) if whole else (rank * ROWS, (rank + 1) * ROWS)
        found = torch.empty((last - first) * COLUMNS)
        state: dict[str, Any] = {KEY: NamedShard((WORLD * ROWS, COLUMNS), start=first * COLUMNS, values=found)}
        with files.opened(newest.path, newest.manifest.files) as opened:
            named_state.read(state, newest.path, files=opened)
        assert torch.equal(found.view(-1, COLUMNS), values(newest.step)[first:last])
        return newest.step, *files.report()


def file_of(work: Path, rank: int, step: int = 2) -> Path:
    return work / f"run/checkpoints/step-{step:08d}/__{rank}_0.distcp"


def copy_of(work: Path, rank: int) -> Path:
    return memory_of(work, TWO_NODES[rank]).folder(2) / f"__{rank}_0.distcp"


@pytest.fixture
def saved(world: Ranks, tmp_path: Path) -> Path:
    """A run of two nodes with checkpoints of steps 1 and 2."""
    world.run(save, tmp_path, TWO_NODES, (1, 2))
    return tmp_path


@pytest.mark.parametrize("whole", [False, True], ids=["the same layout reads its own", "another one that of all nodes"])
def test_a_resume_reads_memory_and_no_file(world: Ranks, saved: Path, whole: bool) -> None:
    for rank in range(WORLD):
        file_of(saved, rank).unlink()
    step, read, warnings = world.run(resume, saved, TWO_NODES, whole)[0]
    assert (step, warnings, read["run_dir"]) == (2, [], 0)
    if whole:
        assert read["other_nodes"] > WORLD * WORLD * ROWS * COLUMNS * 4 / 2  # each rank half of it
    else:
        assert read["memory"] > 2 * WORLD * ROWS * COLUMNS * 4  # verified once, and loaded
        assert read["other_nodes"] == 0


def test_of_a_lost_node_only_its_files_are_read_from_the_run_directory(world: Ranks, saved: Path) -> None:
    shutil.rmtree(saved / "node1")
    for rank in (0, 1):
        file_of(saved, rank).unlink()
    sizes = [file_of(saved, rank).stat().st_size for rank in (2, 3)]
    step, read, _ = world.run(resume, saved, TWO_NODES, False)[0]
    assert step == 2
    assert sum(sizes) < read["run_dir"] <= 2 * sum(sizes)  # verified once, and loaded
    assert read["other_nodes"] == 0


def test_the_ranks_of_the_lost_node_move_to_another(world: Ranks, saved: Path) -> None:
    shutil.rmtree(saved / "node1")
    for rank in (0, 1):
        file_of(saved, rank).unlink()
    moved = (0, 2, 2, 0)  # rank 1, whose file is on node 0, is on a new node now
    step, read, _ = world.run(resume, saved, moved, False)[0]
    assert step == 2
    assert ROWS * COLUMNS * 4 < read["other_nodes"] < 2 * ROWS * COLUMNS * 4
    assert read["run_dir"] > 0


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_copy_is_removed_and_the_file_is_read_instead(world: Ranks, saved: Path, damage: str) -> None:
    copy = copy_of(saved, 3)
    if damage == "flipped":
        flip_a_byte(copy)
    else:
        copy.write_bytes(copy.read_bytes()[:-100])
    for rank in (0, 1, 2):
        file_of(saved, rank).unlink()
    step, read, warnings = world.run(resume, saved, TWO_NODES, False)[0]
    assert step == 2
    assert read["run_dir"] > ROWS * COLUMNS * 4
    assert len(warnings) == 1
    assert "step-00000002/__3_0.distcp" in warnings[0]
    assert "is damaged" in warnings[0]
    assert not copy.exists()


def test_a_damaged_file_not_in_memory_sends_the_run_back_to_the_one_before(world: Ranks, saved: Path) -> None:
    copy_of(saved, 3).unlink()
    flip_a_byte(file_of(saved, 3))
    step, read, _ = world.run(resume, saved, TWO_NODES, False)[0]
    assert step == 1
    assert read["run_dir"] > WORLD * ROWS * COLUMNS * 4  # the copies were of step 2 alone
    assert not copy_of(saved, 0).exists()  # they are of no use any more


def resume_without_peers(rank: int, work: Path) -> Any:
    def refuse(*_args: Any) -> None:
        raise ConnectionRefusedError("refused")

    real, memory_server.Client._connected = memory_server.Client._connected, refuse  # type: ignore[method-assign, assignment]
    try:
        return resume(rank, work, TWO_NODES, True)
    except CheckpointError as error:
        return str(error)
    finally:
        memory_server.Client._connected = real  # type: ignore[method-assign]


def test_a_node_that_cannot_be_reached_is_replaced_by_the_files(world: Ranks, saved: Path) -> None:
    step, read, warnings = world.run(resume_without_peers, saved)[0]
    assert step == 2
    assert read["other_nodes"] == 0
    assert read["run_dir"] > WORLD * WORLD * ROWS * COLUMNS * 4 / 2
    assert any("refused" in line for line in warnings)


def test_a_file_that_nobody_has_verified_is_verified_before_it_replaces_a_node(world: Ranks, saved: Path) -> None:
    flip_a_byte(file_of(saved, 0))
    found = world.run(resume_without_peers, saved)
    assert all("__0_0.distcp does not have the checksum it was written with" in each for each in found)


def test_copies_that_are_not_of_the_checkpoint_are_not_taken(world: Ranks, saved: Path) -> None:
    """Left by a dead job: its run has gone on elsewhere, from step 1, to another step 2."""
    for rank in range(WORLD):
        shutil.copy(file_of(saved, rank, step=1), copy_of(saved, rank))
    step, read, warnings = world.run(resume, saved, TWO_NODES, False)[0]
    assert step == 2
    assert len(warnings) == WORLD
    assert read["run_dir"] > WORLD * ROWS * COLUMNS * 4


def test_a_run_without_checkpoints_removes_what_is_left(world: Ranks, saved: Path) -> None:
    shutil.rmtree(saved / "run")
    assert world.run(begin, saved) == [None] * WORLD
    assert not list(saved.glob("node*/*/*/step-*"))


def begin(rank: int, work: Path) -> Any:
    memory = memory_of(work, TWO_NODES[rank])
    with used(memory):
        return CheckpointStore(work / "run", keep=3).newest_intact(lambda _line: None, files=RestartFiles(memory))


def test_requests_without_the_token_get_nothing(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    with memory_server.served({"f": tmp_path / "f"}, master="127.0.0.1") as address:
        client = memory_server.Client(address)
        assert client.read("f", 2, 3).read() == b"234"
        assert client.read("f", 0, 10).read() == b"0123456789"
        with pytest.raises(OSError, match="sent 5 of 20"):
            memory_server.Client(address).read("f", 5, 20)
        with pytest.raises(OSError, match="does not serve"):
            memory_server.Client(address).read("../f", 0, 1)
        wrong = memory_server.MemoryServerAddress(address.hosts, address.port, "0" * 32)
        with pytest.raises(OSError, match="does not serve"):
            memory_server.Client(wrong).read("f", 0, 1)
