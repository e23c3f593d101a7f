"""Tokens on a node's own disk: staged once and whole, used again and removed; spans of stores in a bounded cache."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from foundation.directory import free_bytes, read_manifest
from foundation.errors import DataError
from pipeline.data.dataset import TokenDataset
from pipeline.data.span_cache import Part, SpanCache
from pipeline.data.staging import check_space, copy_path, in_use, remove_copy, stage
from tests.conftest import ROOT, launch, losses, start, tiny_config, write_config
from tests.data.sparse import write_sparse

STAGE = """
import sys, time
from pathlib import Path
from foundation.directory import read_manifest
from pipeline.data.staging import stage
path, to, pause = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
print(stage(to, path, read_manifest(path, kind="tokens"), progress=lambda: time.sleep(pause)).copied_bytes)
"""


def nothing() -> None:
    """Takes no progress."""


def staging(tokens: Path, to: Path, *, pause_s: float = 0.0) -> subprocess.Popen[str]:
    """A process that stages; it pauses after each file or 8 MB."""
    command = [sys.executable, "-c", STAGE, str(tokens), str(to), str(pause_s)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_copy_is_read_in_place_of_the_original_and_used_again(tokens: Path, tmp_path: Path) -> None:
    original = tmp_path / "tokens"
    shutil.copytree(tokens, original)
    manifest, to = read_manifest(original, kind="tokens"), tmp_path / "local"
    copy = stage(to, original, manifest, progress=nothing)
    assert copy.copied_bytes == sum(entry["bytes"] for entry in manifest.files.values())
    assert copy.path == copy_path(to, original, manifest)
    dataset = TokenDataset.open(original, split="train", sequence_length=32)
    expected = TokenDataset.open(tokens, split="train", sequence_length=32).read(np.arange(dataset.windows))
    dataset.read_from(copy.path)
    shutil.rmtree(original)
    assert np.array_equal(dataset.read(np.arange(dataset.windows)), expected)
    assert stage(to, original, manifest, progress=nothing).copied_bytes == 0  # the original is not even there
    assert TokenDataset.open(copy.path, split="train", sequence_length=32).windows == dataset.windows


def test_of_several_processes_one_copies_and_the_others_wait(tokens: Path, tmp_path: Path) -> None:
    processes = [staging(tokens, tmp_path / "local", pause_s=0.05) for _ in range(3)]
    copied = [int(process.communicate(timeout=300)[0]) for process in processes]
    assert sorted(copied)[:2] == [0, 0]
    assert sorted(copied)[2] > 0


def test_a_copy_without_room_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    huge = write_sparse(tmp_path / "huge", shards=100, tokens=4 * 10**9, documents=2)  # 800 GB of holes
    manifest, to = read_manifest(huge, kind="tokens"), tmp_path / "local"
    with pytest.raises(DataError, match=r"(?s)GB free; nothing was copied.*leave data\.stage_to out"):
        check_space(to, huge, manifest)
    assert not to.exists()
    with pytest.raises(DataError, match="nothing was copied"):
        stage(to, huge, manifest, progress=nothing)
    assert [path.name for path in to.iterdir() if path.is_dir()] == []


def test_a_damaged_original_is_refused_and_leaves_no_copy(tokens: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "tokens"
    shutil.copytree(tokens, damaged)
    shard = damaged / "train/shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DataError, match=r"shard-00000\.bin has another checksum"):
        stage(tmp_path / "local", damaged, read_manifest(damaged, kind="tokens"), progress=nothing)
    assert [path for path in (tmp_path / "local").iterdir() if path.is_dir()] == []


def test_a_damaged_copy_is_made_again(tokens: Path, tmp_path: Path) -> None:
    manifest = read_manifest(tokens, kind="tokens")
    copy = stage(tmp_path, tokens, manifest, progress=nothing)
    (copy.path / "train/shard-00000.bin").unlink()
    assert stage(tmp_path, tokens, manifest, progress=nothing).copied_bytes > 0
    assert (copy.path / "train/shard-00000.bin").is_file()


def test_a_killed_copy_is_absent_and_the_next_start_makes_it(tokens: Path, tmp_path: Path) -> None:
    to, final = tmp_path / "local", copy_path(tmp_path / "local", tokens, read_manifest(tokens, kind="tokens"))
    killed = staging(tokens, to, pause_s=0.5)
    while not list(to.glob(".*.partial/*")):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not final.exists()
    assert list(to.glob(".*.partial"))
    assert int(staging(tokens, to).communicate(timeout=300)[0]) > 0
    assert final.is_dir()
    assert not list(to.glob(".*.partial"))


def test_a_copy_that_is_read_is_not_removed(tokens: Path, tmp_path: Path) -> None:
    copy = stage(tmp_path, tokens, read_manifest(tokens, kind="tokens"), progress=nothing)
    with in_use(copy.path):
        assert not remove_copy(copy.path)
    assert copy.path.is_dir()
    assert remove_copy(copy.path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_what_the_copy_removes_first_counts_as_free(tokens: Path, tmp_path: Path) -> None:
    original = tmp_path / "tokens"
    shutil.copytree(tokens, original)
    manifest, to = read_manifest(original, kind="tokens"), tmp_path / "small"
    needed = sum(entry["bytes"] for entry in manifest.files.values())
    with small_disk(to, kilobytes=needed * 5 // 4 // 1024 + 64):
        killed = staging(original, to, pause_s=0.05)
        while sum(each.stat().st_size for each in to.glob(".*.partial/**/*") if each.is_file()) < needed // 2:
            assert killed.poll() is None
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert free_bytes(to) < needed
        check_space(to, original, manifest)
        assert int(staging(original, to).communicate(timeout=300)[0]) == needed
        copy = copy_path(to, original, manifest)
        with (copy / "train/shard-00000.bin").open("ab") as shard:
            shard.write(b"\0")  # damaged, so that it is made again
        check_space(to, original, manifest)
        copy.rename(to / "of-other-tokens")
        with pytest.raises(DataError, match=r"remove copies that no run needs \(of-other-tokens\)"):
            check_space(to, original, manifest)


@pytest.mark.integration
def test_a_run_on_staged_data_has_the_same_losses_and_removes_the_copy_at_its_end(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "plain", engine="torch")
    config["run"]["steps"] = 10
    path = write_config(tmp_path / "c.json", config)
    launch("train.py", path)
    local = tmp_path / "local"
    sets = (f"data.stage_to={local}", "data.stage_keep=false")
    said = launch("train.py", path, f"run.dir={tmp_path / 'staged'}", *sets, processes=2)
    assert "staged data: " in said
    assert losses(tmp_path / "staged") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    assert [each.name for each in local.iterdir() if each.is_dir()] == []
    launch("train.py", path, f"run.dir={tmp_path / 'kept'}", sets[0])
    again = launch("train.py", path, f"run.dir={tmp_path / 'again'}", sets[0])
    assert f"is read from {local}" in again


@contextlib.contextmanager
def small_disk(path: Path, *, kilobytes: int = 16) -> Iterator[None]:
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(path)], check=False)
    if made.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.integration
def test_a_run_whose_data_has_no_room_is_refused_with_code_2(tokens: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    with small_disk(tmp_path / "small"):
        refused = start("train.py", path, f"data.stage_to={tmp_path / 'small'}")
    assert refused.returncode == 2
    assert "nothing was copied" in refused.stdout
    assert not (tmp_path / "run").exists()


SIZE, STORED = 1000, 1032


def part(step: int, order: str = "a") -> Part:
    return Part(order, step, ((f"s3://store/{order}", SIZE * step, SIZE),))


def fill(cache: SpanCache, *parts: Part) -> None:
    for each in parts:
        assert cache.write(each, [bytes([each.step % 256]) * SIZE])


def steps(cache: SpanCache, order: str = "a") -> list[int]:
    return [step for step in range(300) if cache.has(part(step, order))]


def test_a_part_is_read_as_it_was_written_and_a_damaged_one_is_not_believed(tmp_path: Path) -> None:
    cache = SpanCache(tmp_path, limit=10 * STORED)
    fill(cache, part(1))
    data = cache.read(part(1))
    assert data is not None
    assert bytes(data) == bytes([1]) * SIZE
    path = tmp_path / part(1).stored.name
    for damaged in (path.read_bytes()[:-1], path.read_bytes()[:-1] + b"x"):
        path.write_bytes(damaged)
        assert cache.read(part(1)) is None
        assert not cache.has(part(1))
        fill(cache, part(1))


def test_steps_that_are_done_go_first_and_then_those_that_are_needed_last(tmp_path: Path) -> None:
    cache = SpanCache(tmp_path, limit=5 * STORED)
    with cache.reader("a", 1) as at:
        fill(cache, *map(part, (1, 2, 3, 4, 9)))
        assert not cache.write(part(10), [b"x" * SIZE]), "all others are needed before it"
        assert steps(cache) == [1, 2, 3, 4, 9]
        fill(cache, part(5))
        assert steps(cache) == [1, 2, 3, 4, 5]
        at(3)
        fill(cache, part(6), part(7))
        assert steps(cache) == [3, 4, 5, 6, 7]
        assert not cache.make_room(part(8))
    with cache.reader("b", 1):
        fill(cache, part(8, "b"))  # nobody reads the other order any more
        assert steps(cache) == [4, 5, 6, 7]


def test_a_reader_that_is_behind_keeps_what_it_needs_and_one_that_is_ahead_its_next_steps(tmp_path: Path) -> None:
    cache = SpanCache(tmp_path, limit=4 * STORED)
    with cache.reader("a", 1), cache.reader("a", 100), cache.reader("b", 50):
        fill(cache, part(2), part(8), part(101), part(53, "b"))
        fill(cache, part(100))  # 8 is needed in seven steps, all others sooner
        assert steps(cache) == [2, 100, 101]
        fill(cache, part(51, "b"))
        assert steps(cache) == [2, 100, 101]
        assert steps(cache, "b") == [51]


READ = """
import sys, time
from pathlib import Path
from pipeline.data.span_cache import SpanCache
with SpanCache(Path(sys.argv[1]), limit=0).reader("a", 1):
    print("reading", flush=True)
    time.sleep(60)
"""


def test_a_reader_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    cache = SpanCache(tmp_path, limit=2 * STORED)
    process = subprocess.Popen([sys.executable, "-c", READ, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        fill(cache, part(1), part(2))
        assert not cache.make_room(part(3))
    finally:
        process.kill()
        process.wait()
    assert cache.make_room(part(3, "b")) is False, "of parts that nobody needs none makes room for another"
    with cache.reader("b", 1):
        assert cache.make_room(part(3, "b"))


def test_what_a_killed_process_has_left_of_a_part_is_not_one(tmp_path: Path) -> None:
    cache = SpanCache(tmp_path, limit=STORED)
    (tmp_path / ".partial").write_bytes(b"x" * 10)
    assert cache.used == 0
    fill(cache, part(1))
    assert cache.used == STORED
    assert not (tmp_path / ".partial").exists()
