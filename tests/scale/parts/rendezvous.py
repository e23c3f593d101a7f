"""Rendezvous: the store in rank 0's process while ranks join, make groups and wait, with as many simulated ranks.

What a rank asks is recorded of 4 to 16 real ranks at every size, and has to be what the simulated ranks ask.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from foundation.processes import raise_file_limit
from pipeline.config.topology import Topology
from pipeline.engines.parallel.mesh import Mesh
from pipeline.run.preflight import preflight
from pipeline.runtime.launch.environment import Launch
from pipeline.runtime.launch.group import process_group
from pipeline.runtime.launch.rendezvous import Rendezvous, mark
from pipeline.runtime.launch.store import open_rendezvous
from pipeline.runtime.launch.wait_for_rank_zero import look_s
from tests.scale.measuring import Figures, Part, measured, measured_process, resident_bytes
from tests.scale.store_traffic import Recorder, Request, StoreClient

RANKS = (1024, 2048, 4096, 8192)
_REAL = dict(zip(RANKS, (4, 8, 12, 16), strict=True))
"""Real ranks whose requests are recorded at each size."""
_AXES = ("pp", "shard", "cp")
_STARTED = "while the process group was opened"
_BEFORE, _MAKING, _MADE = (
    "before process groups were made",
    "while process groups were made",
    "before the first all-reduce",
)
_CHECKED = ("passed/pp", "passed/data", "passed/cp", "passed/all ranks", "in the all-reduces that are timed")
_OWN_MOUNTS, _OWN_USERS, _BIND = 0x00020000, 0x10000000, 4096
"""CLONE_NEWNS and CLONE_NEWUSER of `unshare`, MS_BIND of `mount`."""
_ADDRESS = bytes(154)
"""What gloo sets for a group: its address, of a host with a name of two letters."""
_KEYS_OF_RANK = 3 + len(_AXES)
"""Host, default group, the mesh's groups, and that of the stage."""
Phase = tuple[list[Request], list[Request], str]
"""Requests on a rank's two connections, and the key that all ranks wait for at the end."""


def layout(ranks: int) -> Topology:
    """With groups of every kind."""
    return Topology(pp=2, cp=2, dp=ranks // 4)


def phases(rank: int, ranks: int) -> list[Phase]:
    """What a rank asks of the store at the start of a run, with gloo as it is beside NCCL.

    Until all have joined; until all have the default group; until all have the groups; the all-reduces of the check,
    for which gloo asks for the addresses of the two neighbours in a ring; then the group of a pipeline stage.
    """

    def group(axis: str, of: int) -> str:
        return f"/headrace/0//{axis}//cpu//0/{of}"

    def note(key: str, *, count: str = "") -> list[Request]:
        marked = Request("APPEND", f"/headrace/notes/{key}/ranks", f"{rank} ".encode())
        waits = Request("ADD", f"/headrace/notes/{count}", number=1), Request("WAIT", f"/headrace/notes/all {count}")
        return [marked, *waits] if count else [marked]

    def address(key: str) -> list[Request]:
        return [Request("WAIT", key), Request("WAIT", key), Request("GET", key)]

    own = [Request("SET", group(axis, rank), _ADDRESS) for axis in _AXES]
    joined = [
        Request("SET", f"/headrace/notes/host/{rank}", b"vm"),
        Request("ADD", "/headrace/notes/ranks_on/vm", number=1),
        Request("SET", f"/headrace/notes/device/{rank}", b"cpu (gloo)|"),
        Request("COMPARE_SET", "/headrace/notes/device", b"cpu (gloo)"),
        Request("APPEND", "/headrace/notes/joined/ranks", f"{rank} ".encode()),
        Request("ADD", "/headrace/notes/arrived", number=1),
        Request("WAIT", "/headrace/notes/complete"),
    ]
    zero = [
        Request("ADD", "/headrace/notes/ranks_on/vm", number=0),
        *(Request(each, "/headrace/notes/host/0") for each in ("WAIT", "GET")),
        Request("CHECK", "/headrace/notes/devices differ"),
    ]
    of_all = f"/headrace/0//cpu//0/{rank}"
    default = [Request("SET", of_all, _ADDRESS)]
    top = layout(ranks)
    sizes = {group("pp", rank): top.pp, group("shard", rank): top.dp * top.cp, group("cp", rank): top.cp, of_all: ranks}
    asked = [each for key, size in sizes.items() for _ in range(min(2, size - 1)) for each in address(key)]
    return [
        ([], joined, "complete"),
        (default, [*zero, *note(_STARTED), *note(_BEFORE, count=_BEFORE)], f"all {_BEFORE}"),
        (own, [*note(_MAKING), *note(_MADE, count=_MADE)], f"all {_MADE}"),
        (asked, [each for key in _CHECKED for each in note(key)], ""),
        ([Request("SET", group("stage", rank), _ADDRESS)], [], ""),
    ]


def counted(requests: list[Request]) -> Counter[tuple[str, str, int]]:
    """Operation, kind of key and size of the value -> how often, without the keys that the last rank to come sets."""
    found: Counter[tuple[str, str, int]] = Counter()
    for each in requests:
        key = re.sub(r"^/headrace/0//cpu//0/\d+$", "default", each.key)
        key = re.sub(r"^/headrace/0//.+//cpu//0/\d+$", "group", key)
        key = re.sub(r"/(host|device)/\d+$", r"/\1", key)
        key = re.sub(r"/ranks_on/.*$", "/ranks_on", key)
        if each.operation not in ("VALIDATE", "PING") and not (
            each.operation == "SET" and re.search("/(complete|all [^/]*)$", key)
        ):
            found[each.operation, key, 0 if each.operation == "APPEND" else len(each.value)] += 1
    return found


def recorded(ranks: int) -> list[list[Request]]:
    """What each of some real ranks but rank 0 asks of the store until its groups are made and checked."""
    port = _free_port()
    recorder = Recorder(port)
    fork = get_context("fork")
    done = fork.Barrier(ranks)  # rank 0 has the store
    ports = [port, *([recorder.port] * (ranks - 1))]
    processes = [fork.Process(target=_start, args=(rank, ranks, at, done)) for rank, at in enumerate(ports)]
    processes[0].start()
    _listening(port)
    for process in processes[1:]:
        process.start()
    recorder.start()
    for process in processes:
        process.join(300)
        assert process.exitcode == 0, process.exitcode
    of_rank: dict[int, list[Request]] = {}
    for requests in recorder.requests():
        (pid,) = (each.number for each in requests if each.operation == "PING")
        of_rank.setdefault(pid, []).extend(requests)
    return list(of_rank.values())


def _start(rank: int, ranks: int, port: int, done: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_GLOO_LAZY_INIT": "1"}
    with process_group(Launch("scale", rank, ranks, 0, f"127.0.0.1:{port}"), gpu=None) as rendezvous:
        mesh, _ = preflight(rendezvous, lambda: Mesh(layout(ranks), device_type="cpu"), device=torch.device("cpu"))
        mesh.stage_group()
        done.wait(60)


def joined(ranks: int, work: Path) -> Figures:
    """All ranks join, make their groups and check them; the store is in rank 0's process."""
    del work
    real = _REAL[ranks]
    for requests in recorded(real):
        of_phases = [each for base, notes, _ in phases(1, real) for each in (*base, *notes)]
        assert counted(requests) == counted(of_phases), counted(requests) - counted(of_phases)
    port = _free_port()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with _rank_zero(ranks) as (pid, told):
        last = StoreClient(port)
        had, files = resident_bytes(pid), _open_files(pid)
        with measured_process(pid, had=had) as figures:
            clients = [[StoreClient(port, source=f"127.0.0.{2 + at}") for at in (0, 1)] for _ in range(1, ranks)]
            for number in range(len(phases(1, ranks))):
                _play(clients, last, ranks, number)
        assert told.recv() == "joined"
        keys, opened = last.ask(Request("GETNUMKEYS")), _open_files(pid) - files
    assert opened == 2 * (ranks - 1), opened
    assert isinstance(keys, int)
    assert 0 <= keys - _KEYS_OF_RANK * (ranks - 1) < 40, keys
    figures.messages = sum(each.messages for pair in clients for each in pair)
    return figures


def _play(clients: list[list[StoreClient]], last: StoreClient, ranks: int, number: int) -> None:
    """A phase of all simulated ranks. `last` is rank 0 in its barriers, and sets what the last rank to come sets."""
    key = ""
    for rank, (base, notes) in enumerate(clients, 1):
        own, noted, key = phases(rank, ranks)[number]
        base.send(own)
        notes.send(noted)
    if key:
        arrived = [int(notes.receive(until="ADD")) for _, notes in clients]
        if key != "complete":
            arrived.append(int(last.ask(Request("ADD", f"/headrace/notes/{key.removeprefix('all ')}", number=1))))
        assert max(arrived) == ranks
        last.send([Request("SET", f"/headrace/notes/{key}", b"1")])
    for pair in clients:
        for each in pair:
            each.receive()


def waiting(ranks: int, work: Path) -> Figures:
    """All ranks wait for rank 0, which measures latencies, during a minute; ten looks at the store are measured."""
    del work
    port, looks = _free_port(), 10
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    look = [Request("CHECK", "/headrace/notes/x/result"), Request("ADD", "/headrace/notes/x/beat")]
    with _rank_zero(ranks) as (pid, _):
        clients = [StoreClient(port, source="127.0.0.2") for _ in range(1, ranks)]
        for each in clients:
            each.messages = 0
        with measured_process(pid, had=resident_bytes(pid)) as figures:
            for _ in range(looks):
                for each in clients:
                    each.send(look)
                for each in clients:
                    each.receive()
    figures.messages = sum(each.messages for each in clients)
    return figures.times(60 / look_s(ranks) / looks)


def groups_made(ranks: int, work: Path) -> Figures:
    """A rank makes its groups of pp 16 x tp 8 x cp 2, on torch's fake backend; messages are calls of `new_group`."""
    del work
    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 2, world_size=ranks)
    made, calls = dist.distributed_c10d._new_process_group_helper, 0

    def count(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return made(*arguments, **named)

    dist.distributed_c10d._new_process_group_helper = count
    with measured() as figures:
        mesh = Mesh(Topology(pp=16, tp=8, cp=2, dp=ranks // 256), device_type="cpu")
        before = calls
        mesh.stage_group()
    assert calls == before + 1  # by its own ranks alone
    figures.messages = calls
    return figures


def missing_named(ranks: int, work: Path) -> Figures:
    """One rank does not pass a check: all others look for it at once, and give up. Measured for some, for all."""
    del work
    asking = 64
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    with _rank_zero(ranks) as (pid, _):
        with ThreadPoolExecutor(asking) as threads:
            stores = list(threads.map(_connected, [ranks] * asking))
        flags = [dist.PrefixStore("headrace/notes", store) for store in stores]
        for rank in range(ranks - 1):
            mark(flags[0], "passed", rank)
        seen = [Rendezvous(rank, ranks, store, 60.0) for rank, store in enumerate(flags)]
        with measured_process(pid, had=resident_bytes(pid)) as figures:
            for each in seen:
                each.mark("gave-up")
                assert each.ranks_without("passed", each.ranks) == [ranks - 1]
    figures.messages = 2 * 3 * asking
    return figures.times(ranks / asking)


@contextmanager
def _rank_zero(ranks: int) -> Iterator[tuple[int, Any]]:
    """Rank 0 of a run, which holds the store, as a process; it says "joined" once all have."""
    ours, theirs = get_context("fork").Pipe()  # forked: it has imported torch
    process = get_context("fork").Process(target=_run_rank_zero, args=(ranks, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    assert ours.recv() == "begins"
    _listening(int(os.environ["MASTER_PORT"]))
    try:
        yield process.pid, ours
    finally:
        process.kill()


def _free_port() -> int:
    """A port below those that the kernel gives to clients, of which there are thousands here."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def _listening(port: int) -> None:
    """Waits until a process listens on a port."""
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _run_rank_zero(ranks: int, told: Any) -> None:
    raise_file_limit()
    _without_name_service()
    told.send("begins")
    kept = open_rendezvous(Launch("scale", 0, ranks, 0, os.environ["MASTER_ADDR"]), 600.0)
    told.send("joined")
    time.sleep(600)
    del kept  # the store is in it


def _without_name_service() -> None:
    """This process looks up names in files alone: its store asks for that of each connection, a resolver's business.

    Raises:
        OSError: it may not have a mount of its own.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = _OWN_MOUNTS if os.getuid() == 0 else _OWN_MOUNTS | _OWN_USERS
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("hosts: files\n")
        file.flush()
        about = file.name.encode(), b"/etc/nsswitch.conf", None, _BIND, None
        if libc.unshare(namespaces) or libc.mount(*about):
            raise OSError(ctypes.get_errno(), "nsswitch.conf cannot be another one for this process")


def _connected(ranks: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), ranks, False, wait_for_workers=False)


def _open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208  not a file operation of the product


PARTS = [
    Part(
        "rendezvous: joining",
        "all ranks join, make their groups of pp 2 x cp 2 and data parallelism, and check them: the cost of the store"
        " in rank 0's process. Each rank has two connections and nine keys, and equal requests at any number of ranks.",
        "ranks",
        RANKS,
        8192,
        joined,
        note="Requests of real ranks were recorded, with gloo set up as beside NCCL; gloo's all-reduces stand for"
        " NCCL's.",
    ),
    Part(
        "rendezvous: process groups",
        "a rank makes its groups of pp 16 x tp 8 x cp 2; messages are calls that make a group.",
        "ranks",
        RANKS,
        8192,
        groups_made,
        note="torch's `DeviceMesh` calls once for each axis under NCCL; otherwise once for each group of the axis, also"
        " for groups without this rank.",
    ),
    Part(
        "rendezvous: waiting for rank 0",
        "the store during a minute in which all ranks wait for rank 0 to measure latencies.",
        "ranks",
        RANKS,
        8192,
        waiting,
    ),
    Part(
        "rendezvous: a missing rank",
        "the store when all ranks but one ask which rank has not passed a check; extrapolated from 64 ranks.",
        "ranks",
        (1000, 2000, 4000, 8000),
        8000,
        missing_named,
    ),
]
