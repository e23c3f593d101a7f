"""Heartbeats and agents: the product's own servers and files, with simulated ranks and hosts."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from foundation.listening import listening_socket
from pipeline.cluster.elastic.agent import Agent
from pipeline.cluster.elastic.files import NodeState, RanksPlan, StateFiles
from pipeline.cluster.elastic.leader import Terms
from pipeline.cluster.elastic.local_ranks import Command
from pipeline.config.sections.run import WatchdogSection
from pipeline.runtime.faults.heartbeat_connection import heartbeat_interval, heartbeat_timeout
from pipeline.runtime.faults.heartbeat_messages import MessageDecoder, encode, greeting
from tests.scale.measuring import Figures, Part, cpu_s, measured, measured_process

RANKS = (1000, 2000, 4000, 8000)
HOSTS = (125, 250, 500, 1000)
_TOKEN = "scale"
_QUICK_S = 4.0
"""Seconds between heartbeats in place of up to 31 s, where a cell waits for a timeout."""


class Ranks:
    """Simulated ranks of a run: their connections to a heartbeat server that is a process as in the product.

    Args:
        count: how many.
        work: the run's directory.
        interval_s: seconds between heartbeats; that of the product when None.
    """

    def __init__(self, count: int, work: Path, *, interval_s: float | None = None) -> None:
        self.interval_s = interval_s or heartbeat_interval(count)
        self._listener = listening_socket("localhost", count)
        config = {"listener": self._listener.fileno(), "token": _TOKEN, "world_size": count, "run_dir": str(work)}
        silent_s = heartbeat_timeout(WatchdogSection(), count) if interval_s is None else 3 * interval_s
        config |= {"silent_s": silent_s, "stuck_s": 1800.0}
        command = [sys.executable, "-P", "-m", "pipeline.runtime.faults.heartbeat_server"]
        self.server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[self._listener.fileno()],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])},
        )
        assert self.server.stdin is not None
        with self.server.stdin as stdin:
            stdin.write(json.dumps({**config, "interval_s": self.interval_s}).encode())
        self.connections: list[socket.socket] = []
        self._selector, self._count = selectors.DefaultSelector(), count
        self.received = 0
        self.told: set[socket.socket] = set()
        self.ended: set[socket.socket] = set()

    def register(self) -> None:
        """All connect at once; returns when the server has confirmed each."""
        decoders = {}
        for rank in range(self._count):
            client = socket.create_connection(self._listener.getsockname(), timeout=60)
            about = {"rank": rank, "host": f"node{rank // 8:04}", "pid": 10_000 + rank, "machine": f"m{rank // 8}"}
            client.sendall(greeting(_TOKEN) + encode({**about, "start_ticks": 1, "main_thread": 1}))
            decoders[client] = MessageDecoder()
            self.connections.append(client)
        for client, decoder in decoders.items():
            while not any(decoder.feed(client.recv(4096))):
                pass
            client.setblocking(False)
            self._selector.register(client, selectors.EVENT_READ)

    def beat(self, step: int, *, without: int | None = None) -> None:
        """Each sends a heartbeat, spread over the interval as those of real ranks are."""
        stack = ("all_reduce (torch/distributed/distributed_c10d.py:2810)", "step (pipeline/engines/base.py:210)") * 4
        start = time.monotonic()
        for rank, client in enumerate(self.connections):
            if rank == without or client in self.told or client in self.ended:
                continue
            message = {"phase": "training", "step": step, "transitions": step, "ticks": 0}
            with suppress(OSError):  # the server has ended the run
                client.sendall(encode({**message, "stack": stack} if step % 4 == 0 else message))
            if rank % 100 == 0:
                self.drain(max(0.0, start + self.interval_s * rank / len(self.connections) - time.monotonic()))

    def drain(self, seconds: float) -> None:
        """Takes what the server has sent; `told` have a diagnosis then, and `ended` were disconnected."""
        for key, _ in self._selector.select(seconds):
            client = key.fileobj
            assert isinstance(client, socket.socket)
            try:
                data = client.recv(1 << 20)
            except ConnectionResetError:
                data = b""
            self.received += 1
            if b'"diagnosis"' in data:
                self.told.add(client)
            if not data:
                self.ended.add(client)
                self._selector.unregister(client)


def registered(ranks: int, work: Path) -> Figures:
    """All ranks connect and register at once, as after a restart."""
    neighbours = Ranks(ranks, work)
    time.sleep(2)  # the server has been imported
    with measured_process(neighbours.server.pid) as figures:
        neighbours.register()
    figures.messages = 2 * ranks
    neighbours.server.kill()
    return figures


def a_minute(ranks: int, work: Path) -> Figures:
    """The server during a minute of training, measured over three intervals."""
    neighbours = Ranks(ranks, work)
    neighbours.register()
    rounds, before = max(3, round(8 / neighbours.interval_s)), neighbours.received
    with measured_process(neighbours.server.pid) as figures:
        for step in range(rounds):
            neighbours.beat(step)
    assert neighbours.server.poll() is None
    figures.messages = rounds * ranks + neighbours.received - before
    neighbours.server.kill()
    return figures.times(60 / figures.seconds)


def silent_rank(ranks: int, work: Path) -> Figures:
    """A rank goes silent: until it is in the journal of faults and every other rank has the diagnosis."""
    neighbours = Ranks(ranks, work, interval_s=_QUICK_S)
    neighbours.register()
    neighbours.beat(1)
    silent, step = ranks // 3, 2
    with measured_process(neighbours.server.pid) as figures:
        deadline = time.monotonic() + 8 * neighbours.interval_s + 60
        while not neighbours.told and time.monotonic() < deadline:
            neighbours.beat(step, without=silent)
            step += 1
        while len(neighbours.told) < ranks and time.monotonic() < deadline:
            neighbours.drain(0.5)
    assert len(neighbours.told) == ranks
    journal = work / "faults.jsonl"  # written after the ranks have been told
    while not (journal.exists() and journal.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    row = json.loads(journal.read_text().splitlines()[0])
    assert (row["fault"], row["ranks"][0]["rank"]) == ("silent", silent)
    figures.messages = ranks
    neighbours.server.kill()
    return figures


def signed_off(ranks: int, work: Path) -> Figures:
    """All ranks sign off, one after the other, as at the end of a run."""
    neighbours = Ranks(ranks, work)
    neighbours.register()
    with measured_process(neighbours.server.pid) as before:
        pass
    start, used = time.monotonic(), cpu_s(neighbours.server.pid)
    for client in neighbours.connections:
        client.sendall(encode({"finished": True}))
        client.shutdown(socket.SHUT_RDWR)
        time.sleep(0.0005)
    _, code, usage = os.wait4(neighbours.server.pid, 0)
    assert code == 0
    seconds = time.monotonic() - start
    return Figures(usage.ru_utime + usage.ru_stime - used, seconds, before.bytes, messages=2 * ranks)


def leader(hosts: int, work: Path) -> Figures:
    """The agent that leads, during a minute of training."""
    return _agent(hosts, work, 0)


def follower(hosts: int, work: Path) -> Figures:
    """An agent that follows, during a minute of training."""
    return _agent(hosts, work, 1)


def all_agents(hosts: int, work: Path) -> Figures:
    """What the file system gets from all agents together in a minute."""
    return _agent(hosts, work, 1).times(hosts)


_TRAINING_S = 10.0


def _agent(hosts: int, work: Path, number: int) -> Figures:
    nodes = tuple(f"node{each:04}" for each in range(hosts))
    files = StateFiles(work, node=nodes[number], nodes=nodes)
    terms = Terms(dict.fromkeys(nodes, "10.0.0.1"), 1, 3, 7, lambda _count: None, lambda: 0)
    command = Command(("true",), 8, work / "log")
    agent = Agent(nodes[number], command, terms, files, join_s=60.0, say=lambda _line: None)
    others = get_context("fork").Process(target=_neighbours, args=(work, nodes, number), daemon=True)
    others.start()
    while not (work / f"{nodes[-1]}.json").exists():
        time.sleep(0.05)
    with measured() as figures:
        plan = agent.run()
    assert plan.outcome == 0
    others.kill()
    others.join()
    return figures.times(60 / figures.seconds)


def _neighbours(work: Path, nodes: tuple[str, ...], number: int) -> None:
    """The files of all other agents, each replaced as often as that agent would."""
    plan = RanksPlan(1, 1, tuple(node for at, node in enumerate(nodes) if at != number), "10.0.0.1", 12345, "start")
    writers = {node: StateFiles(work, node=node, nodes=nodes) for at, node in enumerate(nodes) if at != number}
    start, count, ended = time.monotonic(), 0, False
    first = next(iter(writers.values()))
    while True:
        began, count = time.monotonic(), count + 1
        if not ended and began - start > _TRAINING_S:
            plan, ended = replace(plan, version=2, outcome=0, reason="finished"), True
        for node, files in writers.items():
            files._plans = first._plans  # the plan's file is written by one of them
            files.write(NodeState(node, count, plan, start=plan.start, running=not ended))
        time.sleep(max(0.0, began + max(1.0, 0.002 * len(nodes)) - time.monotonic()))


PARTS = [
    Part(
        "heartbeats: register",
        "all ranks connect and register at once, as after a restart.",
        "ranks",
        RANKS,
        8000,
        registered,
    ),
    Part("heartbeats: a minute", "the server during a minute of training.", "ranks", RANKS, 8000, a_minute),
    Part(
        "heartbeats: a silent rank",
        "a rank stops sending heartbeats, until the journal names it and every rank has the diagnosis. The interval is"
        " 4 s and the timeout 12 s here, in the product 31 s and 125 s at 8,000 ranks.",
        "ranks",
        RANKS,
        8000,
        silent_rank,
    ),
    Part(
        "heartbeats: signing off",
        "all ranks sign off one after the other, 0.5 ms apart.",
        "ranks",
        RANKS,
        8000,
        signed_off,
    ),
    Part("agents: the leader", "the agent that leads, during a minute of training.", "hosts", HOSTS, 1000, leader),
    Part("agents: a follower", "any other agent, during a minute of training.", "hosts", HOSTS, 1000, follower),
    Part(
        "agents: all followers",
        "operations of all followers on the shared file system in a minute; no limit is known for it.",
        "hosts",
        HOSTS,
        1000,
        all_agents,
        per_process=False,
    ),
]
