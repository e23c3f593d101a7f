"""How doctor runs checks: limits, kills, skips, ranks, and what is left when it ends in whatever way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foundation.errors import EXIT_INTERRUPTED, TrainingError
from headrace.doctor.check import Check, Context
from headrace.doctor.cluster import DoctorNodes, find_nodes
from headrace.doctor.command import FAILED, diagnose
from headrace.doctor.report import PAGE
from headrace.doctor.runner import started_agents
from tests import warm_python
from tests.headrace.doctor.made_checks import SLEEPS, doctor_command, processes_with, read_findings, write_modules
from tests.support import wait_until

HOSTILE = "<script>alert('x')</script>"


def test_a_check_that_hangs_dies_or_raises_is_one_sentence_and_what_needs_it_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = f"hanging-{tmp_path}"
    path = write_modules(
        tmp_path / "modules",
        hangs=SLEEPS.replace("MARK", mark),
        raises="def run(context):\n    yield Finding(True, 'begun')\n    raise ValueError('a\\nb')\n",
        silent="def run(context):\n    return []\n",
        dies="def run(context):\n    os.kill(os.getpid(), signal.SIGKILL)\n",
        hostile=f'def run(context):\n    yield Finding(False, *3 * ["{HOSTILE}"], where="{HOSTILE}")\n',
    )
    monkeypatch.setenv("PYTHONPATH", path)
    checks = [
        Check("hangs", "it hangs", "hangs", "launcher", 10.0),
        Check("skipped", "it needs it", "raises", "node", 60.0, ("hangs",)),
        Check("raises", "it raises", "raises", "launcher"),
        Check("dies", "it dies", "dies", "launcher"),
        Check("hostile", HOSTILE, "hostile", "launcher"),
        Check("silent", "it says nothing", "silent", "launcher"),
    ]
    out = tmp_path / "out"
    assert diagnose(checks, Context(None, (), out, False, 0.0), find_nodes(None)) == FAILED
    assert processes_with(mark) == []
    found = [(each["check"], each["passed"], each["text"]) for each in read_findings(out)]
    node = os.uname().nodename.partition(".")[0]
    log = f"its log is {out}/logs/"
    assert found == [
        ("hangs", True, "about to sleep"),
        ("hangs", False, f"hangs: it hangs: it did not end within 10 s and was killed; {log}hangs.{node}.log"),
        ("skipped", None, "skipped, because 'hangs' has failed"),
        ("raises", True, "begun"),
        ("raises", False, "ValueError: a"),
        ("dies", False, f"dies: its process ended with signal SIGKILL; {log}dies.{node}.log"),
        ("hostile", False, HOSTILE),
        ("silent", False, "silent: it has reported nothing"),
    ]
    assert "raise ValueError" in (out / f"logs/raises.{node}.log").read_text()
    said = "".join(capfd.readouterr())
    assert "Traceback" not in said
    assert "[2/6] skipped: it needs it\n" in said
    assert "no training should start yet: 2 findings passed, 5 failed, 1 could not be checked here" in said
    page = (out / PAGE).read_text()
    assert HOSTILE not in page
    assert page.count("&lt;script&gt;") == 4


@pytest.mark.parametrize("ill", [False, True])
def test_ranks_join_a_process_group_and_a_failure_of_any_is_named_with_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], ill: bool
) -> None:
    text = (
        "def run(context):\n    import torch, torch.distributed as dist\n    ones = torch.ones(1)\n"
        "    dist.all_reduce(ones)\n    total, rank = ones.item(), dist.get_rank()\n"
        "    yield Finding(True, f'rank {rank}: {total:g}', figures={'total': total})\n"
        f"    if {ill} and rank == 1:\n        yield Finding(False, 'a wrong sum', 'wrong gradients', 'another card')\n"
    )
    out, path = tmp_path / "out", write_modules(tmp_path / "modules", reduces=text)
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(sys, "executable", warm_python.python())
    check, context = Check("reduces", "it reduces", "reduces", "ranks", 120.0), Context(None, (), out, False, 0.0, 2)
    code = diagnose([check], context, find_nodes(None), as_json=True)
    found = read_findings(tmp_path / "out")  # in any order: each rank hands its own on
    first, *others = sorted(found, key=lambda each: not each["passed"])
    assert (first["text"], first["figures"], first["passed"]) == ("rank 0: 2", {"total": 2.0}, True)
    assert [(each["text"], each["where"], each["passed"]) for each in others] == (
        [("a wrong sum", f"rank 1 on {os.uname().nodename}", False)] if ill else []
    )
    assert code == (FAILED if ill else 0)
    printed = capfd.readouterr().out.splitlines()
    assert len(printed) == len(found)  # JSON lines alone
    assert (tmp_path / "out/work/reduces").exists() == ill


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        (signal.SIGINT, EXIT_INTERRUPTED),
        (signal.SIGTERM, EXIT_INTERRUPTED),
    ],
)
def test_nothing_is_left_when_doctor_is_killed_or_interrupted(tmp_path: Path, number: int, code: int) -> None:
    mark = f"left-{tmp_path}"
    path = write_modules(tmp_path / "modules", hangs=SLEEPS.replace("MARK", mark))
    command = doctor_command(tmp_path / "out", [Check("hangs", "it hangs", "hangs", "launcher")])
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    doctor = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: len(processes_with(mark)) == 2, process=doctor)
    doctor.send_signal(number)
    said, _ = doctor.communicate(timeout=60)
    assert doctor.returncode == code
    wait_until(lambda: not processes_with(mark) and not list(tmp_path.glob("headrace-doctor-*")), within_s=30)
    assert "Traceback" not in said
    assert ("interrupted" in said) == (number != signal.SIGKILL)
    page = tmp_path / "out" / PAGE
    assert page.exists() == (number != signal.SIGKILL)
    assert not page.exists() or "doctor did not end" in page.read_text()


def test_a_node_that_is_lost_ends_its_check_and_no_other_waits_for_it(tmp_path: Path) -> None:
    node = os.uname().nodename.partition(".")[0]
    path = write_modules(tmp_path / "modules", kills="def run(context):\n    os.kill(os.getppid(), signal.SIGKILL)\n")
    checks = [Check(name, name, "kills", "node", 60.0) for name in ("first", "second")]
    done = subprocess.run(
        doctor_command(tmp_path / "out", checks), env={**os.environ, "PYTHONPATH": path}, timeout=50, check=False
    )
    assert done.returncode == FAILED
    first, second = read_findings(tmp_path / "out")
    assert (first["passed"], first["text"]) == (False, f"{node} does not answer any more")
    assert (second["passed"], second["text"]) == (None, f"skipped, because {node} does not answer")


def test_a_node_whose_agent_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = DoctorNodes({"a": "127.0.0.1", "b": "127.0.0.1"}, "127.0.0.1", slurm=False)
    starts = ["-c", "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]))).sendall(b'{}\\n')"]

    def start(_nodes: DoctorNodes, port: int, _environ: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", *starts, str(port)], start_new_session=True)

    monkeypatch.setattr(DoctorNodes, "start_agents", start)
    with pytest.raises(TrainingError, match=r"a, b: no agent of doctor has connected .*ended with code 0"):
        started_agents(nodes).__enter__()  # a stranger without the token is no agent
