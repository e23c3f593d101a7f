"""The bounded cache for spans of object stores: what is kept, what goes first, what is believed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pipeline.data.span_cache import Part, SpanCache
from tests.conftest import ROOT

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
