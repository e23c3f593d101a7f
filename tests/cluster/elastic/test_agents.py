"""Real agents with real ranks on one machine: any of them is killed, and the run goes on with the same losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import warm_python
from tests.conftest import launch, losses, tiny_config, write_config
from tests.support import last_step, wait_until

pytestmark = pytest.mark.integration
STEPS = 2000


@dataclass
class Hosts:
    """Agents of two hosts, which share this machine; `work` has the run, the agents' files and logs."""

    work: Path
    config: Path
    python: str = field(default_factory=warm_python.python)
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *options: str, config: Path | None = None, before: Sequence[str] = ()) -> None:
        """Starts an agent, by a command before it that becomes the agent."""
        given = ["--nodes", "a=127.0.0.1,b=127.0.0.1", "--node", name, "--directory", str(self.work / "agents")]
        given += ["--output", str(self.log), "--dead", "5", *options]
        given += ["pipeline.train", "--config", str(config or self.config)]
        with (self.work / f"{name}.log").open("ab") as log:
            self.agents[name] = subprocess.Popen(
                [*before, self.python, "-m", "pipeline.cluster.elastic", *given],
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def log(self) -> Path:
        return self.work / "run.log"

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, said=self._logs)

    def _logs(self) -> str:
        own = [(self.work / f"{name}.log").read_text()[-2000:] for name in self.agents]
        return "\n".join([self.text()[-3000:], *own])

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: last_step(self.work / "run") >= step)

    def losses(self) -> dict[int, float]:
        return losses(self.work / "run", written=False) if (self.work / "run/metrics.jsonl").exists() else {}

    def code(self, name: str) -> int:
        return self.agents[name].wait(timeout=400)  # minutes on busy cores


@pytest.fixture
def hosts(tokens: Path, tmp_path: Path) -> Iterator[Hosts]:
    run = {"dir": str(tmp_path / "run"), "steps": STEPS, "seed": 7, "checkpoint_every": 20}
    config = tiny_config(tokens, tmp_path / "run", run=run, parallel={"elastic": True})
    made = Hosts(tmp_path, write_config(tmp_path / "train.json", config))
    yield made
    for agent in made.agents.values():
        agent.kill()
        agent.wait()


def test_the_first_host_dies_and_comes_back_and_no_loss_differs(hosts: Hosts, tokens: Path, tmp_path: Path) -> None:
    hosts.start("a")
    hosts.start("b")
    hosts.wait_for_step(25)
    hosts.agents["a"].kill()  # its ranks end with it
    hosts.wait_for(lambda: "start 2 on b (a does not answer)" in hosts.text())
    hosts.start("a")
    hosts.wait_for(lambda: "start 3 on a, b (more nodes are there)" in hosts.text())
    hosts.wait_for(lambda: hosts.text().count("resuming after") == 2)
    hosts.wait_for_step(max(hosts.losses()) + 5)
    for name in ("a", "b"):
        hosts.agents[name].send_signal(signal.SIGUSR1)
    assert [hosts.code(name) for name in ("a", "b")] == [75, 75]
    found = hosts.losses()
    assert list(found) == list(range(1, len(found) + 1))
    alone = {"dir": str(tmp_path / "alone"), "steps": 30, "seed": 7}
    config = tiny_config(tokens, tmp_path / "alone", run=alone)
    launch("train.py", write_config(tmp_path / "alone.json", config))
    for step, loss in losses(tmp_path / "alone").items():
        if step <= 20:  # before its own decay of the learning rate begins
            assert found[step] == pytest.approx(loss, rel=1e-4)


def test_a_host_that_comes_late_is_checked_with_the_others_and_blamed_for_nothing(hosts: Hosts) -> None:
    config = json.loads(hosts.config.read_text())
    config["launch"] = {"node_checks": {"timeout": 15.0}}
    write_config(hosts.config, config)
    hosts.start("b", "--node-checks")
    time.sleep(20)  # longer than the checks take
    hosts.start("a", "--node-checks")
    hosts.wait_for(lambda: "agents: start 1 on a, b (start)\n" in hosts.text())
    assert "agents: the nodes are checked (start)\n" in hosts.text()
    assert json.loads((hosts.work / "agents/checks/verdict.json").read_text())["bad"] == {}
    assert not (hosts.work / "run/bad-nodes.json").exists()
    hosts.wait_for_step(1)


@pytest.mark.sweep
def test_a_killed_rank_starts_again_in_place_and_a_stop_request_saves_the_run(hosts: Hosts) -> None:
    config = json.loads(hosts.config.read_text())
    config["run"]["steps"] = 100_000
    write_config(hosts.config, config)
    hosts.python = sys.executable  # the process that waits is started as users start it
    hosts.start("a")
    hosts.start("b")
    hosts.wait_for_step(25)
    hosts.wait_for(lambda: len(warm_python.children(hosts.agents["b"].pid)) == 2)
    rank, waiting = sorted(warm_python.children(hosts.agents["b"].pid))  # the second one has its imports done
    os.kill(rank, signal.SIGKILL)
    hosts.wait_for(lambda: "start 2 on a, b (a rank was lost: rank 1 on b was ended by SIGKILL" in hosts.text())
    hosts.wait_for(lambda: str(Path(f"/proc/{waiting}/fd/0").readlink()) == "/dev/null")  # no longer the agent's pipe
    hosts.wait_for(lambda: "resuming after" in hosts.text())
    hosts.wait_for_step(max(hosts.losses()) + 5)
    for name in ("a", "b"):
        hosts.agents[name].send_signal(signal.SIGUSR1)
    assert [hosts.code(name) for name in ("a", "b")] == [75, 75]
    assert "the run ends with code 75: stopped" in hosts.text()
    assert "stopped by SIGUSR1" in hosts.text()


@pytest.mark.sweep
def test_a_full_disk_makes_no_agent_take_another_for_dead(hosts: Hosts) -> None:
    folder = hosts.work / "agents"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("mounting a tmpfs takes root")
    try:
        config = json.loads(hosts.config.read_text())
        config["run"]["steps"] = 100_000
        write_config(hosts.config, config)
        hosts.start("a")
        hosts.start("b")
        hosts.wait_for_step(10)
        with suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        hosts.wait_for(lambda: hosts.text().count("cannot write its heartbeat") == 2)
        time.sleep(12)  # more than twice --dead
        (folder / "filler").unlink()
        hosts.wait_for_step(last_step(hosts.work / "run") + 50)
        for name in ("a", "b"):
            hosts.agents[name].send_signal(signal.SIGUSR1)
        assert [hosts.code(name) for name in ("a", "b")] == [75, 75]
        assert "start 1 on a, b" in hosts.text()
        assert "start 2" not in hosts.text()
    finally:
        for agent in hosts.agents.values():
            agent.kill()
            agent.wait()
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_host_whose_ranks_cannot_start_is_left_out(hosts: Hosts, tmp_path: Path) -> None:
    # on busy cores a is silent for 5 s and more while it starts its ranks, and would be taken for dead as well
    hosts.start("a", "--dead", "30")
    hosts.start("b", "--dead", "30", config=tmp_path / "missing.json")
    hosts.wait_for(
        lambda: "start 2 on a; left out: b (error: rank 1 on b ended with code 2: error: --config" in hosts.text()
    )
    assert "missing.json" in hosts.text()
    hosts.wait_for_step(10)
    hosts.agents["a"].send_signal(signal.SIGUSR1)
    assert hosts.code("a") == 75


def test_a_config_that_is_refused_starts_no_rank(hosts: Hosts, tmp_path: Path) -> None:
    for name in ("a", "b"):
        hosts.start(name, config=tmp_path / "missing.json")
    assert [hosts.code(name) for name in ("a", "b")] == [2, 2]
    assert hosts.text().count("missing.json") == 1
    assert not (tmp_path / "agents/logs").exists()
