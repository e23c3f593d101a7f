"""Real agents keep checkpoint copies in their host's memory: a lost rank costs no file, a lost host its own alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime.metrics.attempts_journal import read_events
from tests.cluster.elastic.test_agents import Hosts
from tests.conftest import tiny_config, write_config
from tests.warm_python import children

pytestmark = pytest.mark.integration
OWN_TMPFS = 'mount -t tmpfs tmpfs "$0" && exec "$@"'


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def hosts(tokens: Path, tmp_path: Path, shm: Path) -> Iterator[Hosts]:
    """Two hosts on this machine, and a run that does not end by itself."""
    run = {"dir": str(tmp_path / "run"), "steps": 100_000, "seed": 7, "checkpoint_every": 20}
    run |= {"in_memory_checkpoints": str(shm)}
    config = tiny_config(tokens, tmp_path / "run", run=run, parallel={"elastic": True}, engine="torch")
    made = Hosts(tmp_path, write_config(tmp_path / "train.json", config))
    yield made
    for agent in made.agents.values():
        agent.kill()
        agent.wait()


def loads(hosts: Hosts) -> list[dict[str, Any]]:
    return [event for event in read_events(hosts.work / "run")[0] if event["event"] == "loaded"]


def own_memory(shm: Path) -> list[str]:
    """A command that gives an agent and its ranks a tmpfs that no other process sees, and that ends with them."""
    command = ["unshare", "--mount", "sh", "-c", OWN_TMPFS, str(shm)]
    if os.getuid() or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("a mount of its own takes root")
    return command


@pytest.mark.sweep
def test_a_lost_rank_costs_no_file_and_a_lost_host_only_its_own(hosts: Hosts, shm: Path) -> None:
    for name in ("a", "b"):
        hosts.start(name, before=own_memory(shm))
    hosts.wait_for_step(50)
    os.kill(children(hosts.agents["b"].pid)[0], signal.SIGKILL)
    hosts.wait_for(lambda: len(loads(hosts)) == 1)
    [first] = loads(hosts)
    assert first["read"]["run_dir"] == 0
    assert first["read"]["memory"] > 0

    hosts.wait_for_step(first["step"] + 50)
    hosts.agents["b"].kill()  # its ranks end with it, and its tmpfs with them
    hosts.wait_for(lambda: len(loads(hosts)) == 2)
    second = loads(hosts)[1]
    manifest = json.loads((hosts.work / f"run/checkpoints/step-{second['step']:08d}/manifest.json").read_text())
    own, lost = (manifest["files"][f"__{rank}_0.distcp"]["bytes"] for rank in (0, 1))
    assert lost < second["read"]["run_dir"] <= 2 * lost  # verified, and loaded
    assert own < second["read"]["memory"] <= 2 * own

    hosts.start("b", before=own_memory(shm))  # with an empty memory
    hosts.wait_for(lambda: len(loads(hosts)) == 3)
    third = loads(hosts)[2]
    assert third["read"]["run_dir"] == 0  # host a has all of it, and serves it
    assert third["read"]["other_nodes"] > 0


@pytest.mark.sweep
def test_an_agent_that_leaves_removes_the_copies_and_a_killed_one_does_not(hosts: Hosts, shm: Path) -> None:
    hosts.start("a")
    hosts.start("b")
    hosts.wait_for_step(30)
    for name in ("a", "b"):
        hosts.agents[name].kill()
        hosts.agents[name].wait()
    assert list(shm.glob("*/*/step-*"))
    hosts.start("a")
    hosts.start("b")
    hosts.wait_for(lambda: len(loads(hosts)) == 1)
    assert loads(hosts)[0]["read"]["run_dir"] == 0
    hosts.wait_for_step(loads(hosts)[0]["step"] + 25)
    for name in ("a", "b"):
        hosts.agents[name].send_signal(signal.SIGUSR1)
    assert [hosts.code(name) for name in ("a", "b")] == [75, 75]
    assert not list(shm.iterdir())
