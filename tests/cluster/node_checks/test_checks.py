"""The checks themselves, as processes: on this machine, and on virtual hosts of which one has a slow network."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from foundation.memory_size import available_memory
from pipeline.cluster.node_checks.__main__ import BAD_NODES
from pipeline.cluster.node_checks.before_start import addresses_of, check_command, read_verdict
from pipeline.cluster.node_checks.host import check_host
from pipeline.cluster.node_checks.links import BusyError, LinkServer, measure_link
from pipeline.cluster.node_checks.nvidia import command_output, gpu_problems, row_problems, xid_problems
from pipeline.config.sections.node_checks import NodeChecksSection
from tests.conftest import ROOT
from tests.virtual_cluster.cluster import missing_requirements
from tests.virtual_cluster.machine import Machine

MB = 1_000_000
HEALTHY = """\
0, 00000000:1B:00.0, NVIDIA H100 80GB HBM3, 0, [N/A]
1, 00000000:43:00.0, NVIDIA H100 80GB HBM3, 0, [N/A]
2, 00000000:01:00.0, NVIDIA GeForce RTX 3090, [N/A], [N/A]
3, 00000000:02:00.0, Tesla T4, [Not Supported], No
"""


def checks(node: str, directory: Path, nodes: str, *more: str) -> list[str]:
    addresses = dict(each.split("=") for each in nodes.split(","))
    return check_command(addresses, node, directory, attempt="7", arguments=more)


def test_more_nodes_than_an_argument_holds_are_named_by_a_file(tmp_path: Path) -> None:
    nodes = {f"node-{number:05}": f"10.0.{number // 256}.{number % 256}" for number in range(8192)}
    for count in (2, 8192):
        some = dict(list(nodes.items())[:count])
        command = check_command(some, "node-00001", tmp_path / "checks", attempt="1")
        assert max(map(len, command)) < 128 << 10  # Linux refuses to start a process with a longer argument
        assert addresses_of(command[command.index("--nodes") + 1]) == some
    with pytest.raises(ConfigError, match="No such file"):
        addresses_of("@nowhere.txt")


def test_a_link_is_measured_and_a_busy_node_says_so() -> None:
    theirs, ours = threading.Lock(), threading.Lock()
    address = ("127.0.0.1", LinkServer("1", 4 * MB, theirs).start())
    link = measure_link("b", address, attempt="1", payload=4 * MB, free=ours)
    assert link.error == ""
    assert link.mb_s > 1  # loopback; no other number is certain
    assert link.clock_s == pytest.approx(0.0, abs=1.0)  # one clock
    for lock in (theirs, ours):
        with lock, pytest.raises(BusyError):
            measure_link("b", address, attempt="1", payload=MB, free=ours)
    assert "another start" in measure_link("b", address, attempt="2", payload=MB, free=ours).error
    assert "refused" in measure_link("b", ("127.0.0.1", 1), attempt="1", payload=MB, free=ours).error
    assert not ours.locked()


def test_what_this_host_lacks_is_found_and_what_cannot_be_checked_is_said(tmp_path: Path) -> None:
    told: list[str] = []
    terms = NodeChecksSection(min_memory_gb=1e6, min_shm_mb=1e9, min_disk_gb=1e6, max_file_system_s=1e-9)
    found = check_host(tmp_path / "run", terms=terms, devices=1000, tell=told.append, deadline=time.monotonic() + 60)
    assert found.problems.keys() == {"memory", "shm", "disk", "file system", "device"}
    assert "and 1000 are wanted" in found.problems["device"]
    assert told[0] == "memory"
    assert told[-1] == "device"
    assert not list(tmp_path.iterdir())  # nothing is left behind
    check = partial(check_host, tmp_path, terms=NodeChecksSection(), devices=None, tell=told.append)
    good = check(deadline=time.monotonic() + 60)
    assert good.problems == {}
    late = check(deadline=time.monotonic())
    assert late.problems == {}
    assert len(late.skipped) == len(told) // 2


def test_available_memory_is_that_of_meminfo() -> None:
    text = "MemTotal:       24689764 kB\nMemFree:        17000000 kB\nMemAvailable:   23068672 kB\n"
    assert available_memory(text) == 23068672 * 1024


@pytest.mark.integration
def test_a_node_that_hangs_is_the_bad_one_within_the_time(tmp_path: Path) -> None:
    nodes, limit = "a=127.0.0.1,b=127.0.0.1,c=127.0.0.1", ["--config", str(tmp_path / "c.json")]
    config = {"extends": str(ROOT / "ds_configs/zero3.json"), "launch": {"node_checks": {"timeout": 45.0}}}
    (tmp_path / "c.json").write_text(json.dumps(config))
    own = [*limit, "--run-dir", str(tmp_path)]
    hanging = subprocess.Popen(checks("c", tmp_path / "d", nodes, *own), cwd=ROOT)
    try:
        while not (tmp_path / "d/c.json").exists():
            time.sleep(0.01)
        hanging.send_signal(signal.SIGSTOP)
        others = [
            subprocess.Popen(checks(n, tmp_path / "d", nodes, *own), cwd=ROOT, stdout=subprocess.PIPE, text=True)
            for n in "ab"
        ]
        outputs = [other.communicate(timeout=180)[0] for other in others]
    finally:
        hanging.kill()
        hanging.wait()
    assert [other.returncode for other in others] == [BAD_NODES, BAD_NODES]
    for output in outputs:
        assert "bad node c: it did not finish its checks within 45 s; the last thing it did: " in output
        assert "bad node a" not in output
    verdict = read_verdict(tmp_path / "d", attempt="7")
    assert list(verdict.bad) == ["c"]
    assert read_verdict(tmp_path / "d", attempt="8") is None
    assert read_verdict(tmp_path / "nowhere", attempt="7") is None


@contextlib.contextmanager
def hosts(state: Path, count: int) -> Iterator[list[Machine]]:
    """Virtual hosts n1, n2, ... at 10.78.0.1, ... on one bridge."""
    with contextlib.ExitStack() as stack:
        switch = Machine("switch", hosts="127.0.0.1 localhost\n", state=state)
        stack.callback(switch.stop)
        switch.ip("link add bridge type bridge")
        switch.ip("link set bridge up")
        machines = []
        for number in range(1, count + 1):
            name = f"n{number}"
            machine = Machine(name, hosts=f"127.0.0.1 localhost\n127.0.1.1 {name}\n", state=state, inside=switch)
            stack.callback(machine.stop)
            switch.ip(f"link add {name} type veth peer name eth0 netns {machine.pid}")
            switch.ip(f"link set {name} master bridge up")
            machine.ip(f"address add 10.78.0.{number}/24 dev eth0")
            machine.ip("link set eth0 up")
            machines.append(machine)
        yield machines


SHIFTED = """
import runpy, sys, time
real = time.time
time.time = lambda: real() - 40
sys.argv[0] = "node_checks"
runpy.run_module("pipeline.cluster.node_checks", run_name="__main__")
"""


@pytest.mark.integration
@pytest.mark.skipif(missing_requirements() is not None, reason=str(missing_requirements()))
@pytest.mark.parametrize(
    "slowed", [pytest.param("rate", marks=pytest.mark.sweep), pytest.param("cut", marks=pytest.mark.sweep), "none"]
)
def test_the_node_with_a_slow_network_or_another_clock_is_named(tmp_path: Path, slowed: str) -> None:
    nodes = ",".join(f"n{number}=10.78.0.{number}" for number in range(1, 5))
    with hosts(tmp_path, 4) as machines:
        if slowed == "rate":
            machines[2].run(
                "tc",
                *["qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "80mbit", "burst", "64kb", "latency", "100ms"],
            )
        if slowed == "cut":
            machines[2].ip("link set eth0 down")
        processes = []
        config = {"extends": str(ROOT / "ds_configs/zero3.json"), "launch": {"node_checks": {"timeout": 120.0}}}
        (tmp_path / "c.json").write_text(json.dumps(config))
        for machine in machines:
            command = checks(machine.name, tmp_path / "d", nodes, "--config", str(tmp_path / "c.json"))
            if slowed == "none" and machine.name == "n2":
                command = [sys.executable, "-c", SHIFTED, *command[3:]]
            processes.append(
                subprocess.Popen(
                    machine.command(*command, cwd=ROOT),
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    expected = {
        "rate": "bad node n3: its fastest link of 3 has ",
        "cut": r"bad node n3: .*no other node can exchange data with it \(",  # beside other faults on busy cores
        "none": "bad node n2: .*its clock is 40.0 s behind the others'",
    }[slowed]
    assert re.search(expected, outputs[0]), outputs
    assert outputs[0].count("bad node") == 1, outputs
    assert {process.returncode for process in processes} == {BAD_NODES}
    if slowed == "rate":
        verdict = json.loads((tmp_path / "d/verdict.json").read_text())
        speed = float(verdict["bad"]["n3"][0].split("has ")[1].split(" MB/s")[0].replace(",", ""))
        assert speed < 20  # 80 Mbit/s are 10 MB/s, and the first 64 kB pass at once


def test_healthy_gpus_have_no_problem() -> None:
    assert gpu_problems(HEALTHY) == []
    assert row_problems("00000000:1B:00.0, 0, 0\n00000000:43:00.0, No, No\n00000000:01:00.0, [N/A], [N/A]\n") == []
    assert row_problems("00000000:1B:00.0, 1, 0\n") == []  # a pending row does no harm until a reset


def test_uncorrected_errors_pending_pages_and_lost_gpus_are_named() -> None:
    text = """\
0, 00000000:1B:00.0, NVIDIA H100 80GB HBM3, 2, [N/A]
1, 00000000:43:00.0, Tesla V100-SXM2-32GB, 0, Yes
2, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]
3, 00000000:52:00.0, NVIDIA A100-SXM4-80GB, [Unknown Error], [N/A]
"""
    assert gpu_problems(text) == [
        "GPU 0 (00000000:1B:00.0) has 2 uncorrected ECC errors since its driver was loaded",
        "GPU 1 (00000000:43:00.0) has memory pages that a reset would retire",
        "GPU 2 ([GPU is lost]) is lost",
        "GPU 3 (00000000:52:00.0) is lost",
    ]
    assert row_problems("00000000:1B:00.0, 0, 1\n00000000:43:00.0, No, Yes\n") == [
        "GPU 00000000:1B:00.0 has memory rows that could not be remapped",
        "GPU 00000000:43:00.0 has memory rows that could not be remapped",
    ]


def test_recent_xid_errors_of_the_hardware_are_named_once_and_a_programs_own_are_not() -> None:
    log = """\
[   12.000000] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15
[  100.140318] NVRM: Xid (PCI:0000:01:00): 48, pid='<unknown>', name=<unknown>, DBE at partition 2
[200000.678901] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[200000.678950] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[200001.000000] NVRM: Xid (PCI:0000:43:00): 31, pid=2096908, name=python3, Ch 00000008, intr 00000000. MMU Fault
"""
    assert xid_problems(log, uptime_s=200100.0) == ["GPU 0000:3b:00 had Xid 79 (GPU has fallen off the bus)"]


def test_a_command_that_is_missing_fails_or_hangs_says_so() -> None:
    assert command_output(["no-such-smi"], timeout_s=1) == ("", "there is no no-such-smi")
    assert command_output(["sh", "-c", "echo GPU is lost; exit 15"], timeout_s=5) == ("", "GPU is lost")
    assert command_output(["sleep", "30"], timeout_s=0.2) == ("", "sleep did not answer within 0.2 s")
    assert command_output(["echo", "1"], timeout_s=5) == ("1\n", "")
