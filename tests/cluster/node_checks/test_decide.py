"""Which node the checks name, and where they name none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import DataError
from pipeline.cluster.node_checks.bad_nodes import (
    NAME,
    add_fault,
    forgive,
    leave_out,
    main,
    nodes_left_out,
    read_bad_nodes,
)
from pipeline.cluster.node_checks.decide import NodesVerdict, decide, partners_of, rounds
from pipeline.cluster.node_checks.records import NodeLink, NodeRecord
from pipeline.config.sections.node_checks import NodeChecksSection
from tests.conftest import ROOT

TERMS = NodeChecksSection()


def finished(node: str, *links: NodeLink, **fields: Any) -> NodeRecord:
    return NodeRecord(node, stage="finished", links=links, **fields)


def verdict(*records: NodeRecord, nodes: str = "", **terms: Any) -> NodesVerdict:
    found = {record.node: record for record in records}
    return decide(list(nodes or found), found, terms=NodeChecksSection(**terms))


def linked(speeds: dict[str, float], cut: tuple[str, ...] = (), **fields: Any) -> list[NodeRecord]:
    """Four nodes with links such as "ab"; those that are not given have 1000 MB/s, and `cut` ones fail."""
    links = {pair: NodeLink(pair[1], speeds.get(pair, 1000.0), 0.0) for pair in ("ab", "ac", "ad", "bc", "bd", "cd")}
    links |= {pair: NodeLink(pair[1], error="timed out") for pair in cut}
    return [finished(node, *(link for pair, link in links.items() if pair[0] == node), **fields) for node in "abcd"]


def test_good_nodes_are_not_named() -> None:
    assert verdict(*linked({})) == NodesVerdict()


def test_links_that_vary_as_on_a_busy_machine_name_nobody() -> None:
    speeds = {"ab": 240.0, "ac": 1400.0, "ad": 2000.0, "bc": 900.0, "bd": 500.0, "cd": 600.0}
    assert verdict(*linked(speeds)) == NodesVerdict()


@pytest.mark.parametrize("bad", list("abcd"))
def test_the_common_member_of_slow_links_is_named(bad: str) -> None:
    pairs = [pair for pair in ("ab", "ac", "ad", "bc", "bd", "cd") if bad in pair]
    found = verdict(*linked(dict.fromkeys(pairs, 100.0)))
    assert found.bad == {bad: ("its fastest link of 3 has 100 MB/s, the median node's 1,000",)}


@pytest.mark.parametrize(
    ("cut", "bad", "warned"),
    [
        (("ac", "ad", "bc", "bd"), [], "a, b and c, d exchange data only among themselves; no start works until"),
        (("ac", "bc", "cd"), ["c"], ""),
        (("ac",), [], "the link of a and c: timed out, and both are quick with others"),
    ],
)
def test_a_network_that_has_parted_names_its_halves_and_no_node(
    cut: tuple[str, ...], bad: list[str], warned: str
) -> None:
    found = verdict(*linked({}, cut=cut))
    assert list(found.bad) == bad
    assert warned in "".join(found.warnings[:1])
    assert any("parted" in text for text in found.warnings) == (len(cut) == 4)


def test_of_three_nodes_the_slow_one_is_named_although_two_of_three_links_are_slow() -> None:
    found = verdict(
        finished("a", NodeLink("b", 900.0), NodeLink("c", 10.0)), finished("b", NodeLink("c", 12.0)), finished("c")
    )
    assert list(found.bad) == ["c"]


def test_a_slow_link_of_two_quick_nodes_is_a_warning() -> None:
    found = verdict(*linked({"bc": 10.0}))
    assert found.bad == {}
    assert found.warnings == ("the link of b and c: 10 MB/s, and both are quick with others",)


def test_links_that_are_slow_everywhere_name_nobody() -> None:
    found = verdict(*linked({}), min_bandwidth=5000.0)
    assert found == NodesVerdict(warnings=("no node has a link of 5,000 MB/s; the median node's fastest has 1,000",))
    refused = [NodeLink(other, error=f"{other}: refused") for other in "bcdefghijkl"]
    found = verdict(finished("a", *refused), *(finished(node) for node in "bcdefghijkl"))
    assert found.bad == {}
    assert len(found.warnings) == 9
    assert found.warnings[-1] == "3 more links like these"


def test_of_two_nodes_none_can_be_told() -> None:
    found = verdict(finished("a", NodeLink("b", 10.0)), finished("b"), min_bandwidth=100.0)
    assert found.bad == {}
    assert "which of the two is to blame is unknown" in found.warnings[0]


def test_a_node_that_no_other_reaches_is_named() -> None:
    links = [NodeLink("b", 900.0), NodeLink("c", error="c at 10.0.0.3: timed out")]
    found = verdict(
        finished("a", *links), finished("b", NodeLink("c", error="c at 10.0.0.3: timed out")), finished("c")
    )
    assert found.bad == {"c": ("no other node can exchange data with it (c at 10.0.0.3: timed out)",)}


def test_a_node_without_a_record_and_one_that_did_not_finish_are_named() -> None:
    hanging = NodeRecord("c", stage="file system")
    found = verdict(finished("a", NodeLink("b", 900.0)), finished("b"), hanging, nodes="abcd")
    assert found.bad["c"] == ("it did not finish its checks within 60 s; the last thing it did: file system",)
    assert found.bad["d"][0].startswith("no sign of it within 60 s")


def test_where_most_nodes_are_silent_none_is_named() -> None:
    found = verdict(finished("a"), nodes="abcd")
    assert found.bad == {}
    assert found.warnings == ("no more than 1 of 4 nodes have finished: b, c, d have not",)


def test_a_problem_of_every_node_is_the_runs_and_that_of_one_is_its_own() -> None:
    full = {"disk": "/shared has 0.1 GB of free space"}
    found = verdict(finished("a", problems=full), finished("b", problems={**full, "device": "it is wrong"}))
    assert found.common == ("/shared has 0.1 GB of free space",)
    assert found.bad == {"b": ("it is wrong",)}
    assert verdict(finished("a", problems=full)).bad == {"a": ("/shared has 0.1 GB of free space",)}


def test_a_node_with_fewer_devices_than_most_is_named() -> None:
    found = verdict(finished("a", devices=8), finished("b", devices=7), finished("c", devices=8))
    assert found.bad == {"b": ("it has 7 devices, the others 8",)}
    found = verdict(finished("a", devices=8), finished("b", devices=7))
    assert (found.bad, len(found.warnings)) == ({}, 1)


@pytest.mark.parametrize(("offset", "words"), [(30.0, "30.0 s ahead of"), (-30.0, "30.0 s behind")])
def test_a_clock_that_differs_from_all_others_is_named(offset: float, words: str) -> None:
    quick = {"mb_s": 900.0}
    a = finished("a", NodeLink("b", clock_s=0.01, **quick), NodeLink("c", clock_s=offset, **quick))
    found = verdict(a, finished("b", NodeLink("c", clock_s=offset, **quick)), finished("c"))
    assert found.bad == {"c": (f"its clock is {words} the others'",)}
    two = verdict(finished("a", NodeLink("b", clock_s=offset, **quick)), finished("b"))
    assert two.bad == {}
    assert "the nodes' clocks differ" in two.warnings[0]


@given(count=st.integers(1, 24), most=st.integers(1, 30))
def test_the_tournament_meets_every_pair_once_and_each_node_in_one_pair_at_a_time(count: int, most: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    found = rounds(nodes, most=most)
    for pairs in found:
        members = [node for pair in pairs for node in pair]
        assert len(members) == len(set(members)) == count - count % 2
    every = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(every) == len(set(every))
    if most >= count:
        assert len(every) == count * (count - 1) // 2
    assert sum(len(partners_of(node, nodes, most=most)) for node in nodes) == len(every)


def test_a_node_is_left_out_with_its_third_fault(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert read_bad_nodes(run) == {}
    assert [add_fault(run, "n1", f"fault {number}", faults=3).left_out for number in (1, 2)] == [False, False]
    assert add_fault(run, "n2", "another", faults=3).faults == 1
    assert nodes_left_out(run) == {}
    assert add_fault(run, "n1", "fault 3", faults=3).left_out
    assert nodes_left_out(run) == {"n1": "fault 3"}
    entry = read_bad_nodes(run)["n1"]
    assert (entry.faults, entry.reason) == (3, "fault 3")
    assert entry.time > 1.7e9  # a time of this century


def test_another_number_of_faults_may_be_asked_for(tmp_path: Path) -> None:
    assert add_fault(tmp_path, "n1", "fault", faults=1).left_out


def test_a_node_that_is_left_out_by_hand_keeps_its_faults(tmp_path: Path) -> None:
    add_fault(tmp_path, "n1", "fault", faults=3)
    assert leave_out(tmp_path, "n1", "its link is slow").faults == 1
    assert nodes_left_out(tmp_path) == {"n1": "its link is slow"}
    assert add_fault(tmp_path, "n1", "one more", faults=3).left_out  # still
    assert forgive(tmp_path, "n1")
    assert not forgive(tmp_path, "n1")
    assert read_bad_nodes(tmp_path) == {}


def test_faults_that_several_processes_note_at_once_are_all_counted(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pipeline.cluster.node_checks.bad_nodes import add_fault\n"
        "for _ in range(20): add_fault(Path(sys.argv[1]), 'n1', 'fault', faults=100)"
    )
    all_of_them = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT) for _ in range(3)]
    assert [process.wait(timeout=300) for process in all_of_them] == [0, 0, 0]
    assert read_bad_nodes(tmp_path)["n1"].faults == 60


@pytest.mark.parametrize("text", ["{", '{"nodes": {"n1": {"why": "?"}}}', "[]"])
def test_a_damaged_list_is_told_with_its_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(DataError, match="mend it, or remove it"):
        nodes_left_out(tmp_path)


def test_the_command_prints_and_changes_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--leave-out", "n7", "--reason", "loose cable"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("n7: left out, 0 faults, 20")
    assert printed.endswith(": loose cable\n")
    assert main([str(tmp_path), "--forgive", "n7"]) == 0
    assert capsys.readouterr().out == ""
