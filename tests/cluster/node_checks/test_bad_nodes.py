"""The list of bad nodes of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.errors import DataError
from pipeline.cluster.node_checks.bad_nodes import (
    NAME,
    add_fault,
    forgive,
    leave_out,
    main,
    nodes_left_out,
    read_bad_nodes,
)
from tests.conftest import ROOT


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
