"""The agents' files: a node is alive while its count changes, whatever an earlier job has left there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster.elastic.commands import Commands
from pipeline.cluster.elastic.files import NodeState, RanksPlan, StateFiles
from pipeline.cluster.elastic.slurm_requeue import SlurmJob
from tests.conftest import room_for

NODES = ("a", "b")
ENDED = RanksPlan(reason="rank 3 on n2 has died: out of memory", outcome=1)
TEXT = "1\nrank 3 on n2 has died: out of memory\n"


@pytest.fixture(autouse=True)
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass, which stands still otherwise."""
    now = [100.0]
    monkeypatch.setattr("pipeline.cluster.elastic.files.time.monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def files_of(directory: Path, node: str, *, dead_s: float = 0.3) -> StateFiles:
    return StateFiles(directory, node=node, nodes=NODES, dead_s=dead_s)


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = RanksPlan(3, 2, ("b", "a"), "10.0.0.2", 12345, "start", None, True, 1, 40, {"a": 1}, {"c": "error: x"})
    state = NodeState("b", 1, plan, 2, True, {1: -9, 0: 0}, "rank 1 was ended", True)
    writer, reader = files_of(tmp_path, "b"), files_of(tmp_path, "a")
    writer.write(state)
    assert reader.read("b") is None  # it may be an earlier job's
    writer.write(replace(state, count=2))
    assert reader.read("b") == replace(state, count=2)
    assert list(reader.read("b").codes) == [1, 0]  # type: ignore[union-attr]


def test_a_node_is_dead_when_its_count_stands_still_and_alive_when_it_moves_again(
    tmp_path: Path, wait: Callable[[float], None]
) -> None:
    writer, reader = files_of(tmp_path, "a"), files_of(tmp_path, "b")
    for count in (1, 2):
        writer.write(NodeState("a", count))
        found = reader.read("a")
    assert found is not None
    wait(0.4)
    assert reader.read("a") is None
    assert reader.leader() is None  # b leads
    writer.write(NodeState("a", 3))
    assert reader.read("a") is not None
    assert reader.leader() is not None


def test_a_node_that_cannot_write_its_own_file_takes_no_other_for_dead(
    tmp_path: Path, wait: Callable[[float], None]
) -> None:
    """On a full disk all nodes fall silent; each has its whole time again when there is room."""
    writer, reader = files_of(tmp_path, "a"), files_of(tmp_path, "b")
    for count in (1, 2):
        writer.write(NodeState("a", count))
        assert (reader.read("a") is not None) == (count == 2)
    wait(0.2)
    (tmp_path / ".b.new").mkdir()  # the file of its next heartbeat cannot be written
    for _ in range(3):
        with pytest.raises(OSError, match="directory"):
            reader.write(NodeState("b", 1))
        assert reader.failing
        wait(45)
        assert reader.read("a") is not None
        assert reader.leader() is not None
    (tmp_path / ".b.new").rmdir()
    reader.write(NodeState("b", 2))
    assert not reader.failing
    assert reader.read("a") is not None
    wait(0.2)
    assert reader.read("a") is None  # 0.2 s of silence before the disk was full, and 0.2 s after it


def test_a_file_that_cannot_be_read_for_a_moment_is_as_it_was(tmp_path: Path, wait: Callable[[float], None]) -> None:
    writer, reader = files_of(tmp_path, "a"), files_of(tmp_path, "b")
    for count in (1, 2):
        writer.write(NodeState("a", count))
        reader.read("a")
    (tmp_path / "a.json").write_text('{"node": "a", "cou')
    assert reader.read("a") == NodeState("a", 2)
    wait(0.4)
    assert reader.read("a") is None


def test_a_node_leads_only_when_those_before_it_have_had_time_to_come(
    tmp_path: Path, wait: Callable[[float], None]
) -> None:
    reader = files_of(tmp_path, "b")
    files_of(tmp_path, "a").write(NodeState("a", 7, RanksPlan(9, 4, ("a",), outcome=0)))  # of a job that has ended
    waiting = reader.leader()
    assert waiting.plan.version == 0
    wait(0.4)
    assert reader.leader() is None
    assert files_of(tmp_path, "a").leader() is None  # the first node waits for nobody


def test_a_damaged_file_is_that_of_no_one(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"node": "a", "cou')
    assert files_of(tmp_path, "b").read("a") is None


def test_a_node_that_begins_to_lead_does_not_take_those_that_it_never_looked_at_for_dead(
    tmp_path: Path, wait: Callable[[float], None]
) -> None:
    """The second of three nodes reads the first one's file alone while that one leads."""
    nodes = ("a", "b", "c")
    reader = StateFiles(tmp_path, node="b", nodes=nodes, dead_s=0.4)
    writers = {node: StateFiles(tmp_path, node=node, nodes=nodes) for node in ("a", "c")}
    for count in (1, 2):
        for node, writer in writers.items():
            writer.write(NodeState(node, count))
        assert reader.leader() is not None
    wait(0.5)
    assert reader.leader() is None  # a is dead
    assert reader.read("c") is None
    assert reader.unknown("c")
    writers["c"].write(NodeState("c", 3))
    assert reader.read("c") is not None
    assert not reader.unknown("c")
    assert not reader.unknown("a")


def test_guests_are_known_to_those_that_look_for_them(tmp_path: Path) -> None:
    files_of(tmp_path, "a")
    guest = StateFiles(tmp_path, node="g", nodes=(*NODES, "g"))
    guest.announce("10.0.0.7")
    assert files_of(tmp_path, "a").announced() == {"g": "10.0.0.7"}


def test_a_plan_of_a_thousand_nodes_is_written_once_and_their_files_stay_small(tmp_path: Path) -> None:
    nodes = tuple(f"node{number:04}" for number in range(1000))
    plan = RanksPlan(1, 1, nodes, "10.0.0.1", 12345, "start", guests=dict.fromkeys(nodes, "10.0.0.7"))
    leader, follower = (StateFiles(tmp_path, node=node, nodes=nodes) for node in nodes[:2])
    for count in (1, 2):
        leader.write(NodeState(nodes[0], count, plan))
        found = follower.read(nodes[0])
    assert found is not None
    assert found.plan == plan
    follower.write(NodeState(nodes[1], 1, found.plan))
    for count in (1, 2):
        follower.write(NodeState(nodes[1], count, replace(plan, version=2, reason="grown")))
    assert len(list((tmp_path / "plans").iterdir())) == 2
    assert all(path.stat().st_size < 400 for path in tmp_path.glob("*.json"))


def job_in(directory: Path) -> SlurmJob:
    return SlurmJob("7", "n1", directory, directory / "outcome", tasks=2, wanted=2, commands=Commands())


def test_an_outcome_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"), room_for(10):
        job_in(tmp_path).note(ENDED)
    assert list(tmp_path.iterdir()) == []
    job_in(tmp_path).note(ENDED)
    assert [path.name for path in tmp_path.iterdir()] == ["outcome"]
    assert (tmp_path / "outcome").read_text() == TEXT


def test_a_job_that_cannot_be_ended_with_its_code_is_canceled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands are linked with no library here."""
    for name, text in {"scancel": 'echo "$*" >> "$0.calls"', "squeue": "echo 7", "scontrol": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    lines: list[str] = []
    job_in(tmp_path).end(ENDED, step=0, nodes=1, script_lives=False, say=lines.append)
    assert lines[-1] == (
        "Slurm could not end it with that code (scontrol is linked with no libslurm): it is canceled;"
        " submit again what waited for it"
    )
    assert (tmp_path / "scancel.calls").read_text().splitlines()[-1] == "7"
