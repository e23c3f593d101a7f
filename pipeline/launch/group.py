"""Opening the default process group: the backend follows the device, and whoever does not come is named.

torch.distributed would say "timed out waiting for clients, 3/4 joined". Here every rank leaves its host's name in the
store where all meet, before anything else; who is missing can then be read there.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.errors import ConfigError, TrainingError
from pipeline.config.schema import LaunchSection
from pipeline.launch.environment import Launch

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store

T = TypeVar("T")
DEFAULTS = LaunchSection()
STOPPED = "stopped"
"""Rank 0's note that the run is to be started again: spare ranks wait for that."""
OVER = "headrace/over"
"""The note that rank 0 leaves when all is done, for processes that wait beside the run."""
_ASKED = "headrace/asked"
_POLL_S = 0.02


class UnreachableError(TrainingError):
    """A rank does not answer. The process group cannot be closed any more, since its threads wait for that rank."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a run leave notes for each other.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        store: the notes; it lives in rank 0's process, or in torchrun's.
        timeout_s: how long ranks wait for each other at start.
        first_host: rank 0's host, to be named when its store does not answer.
    """

    rank: int
    world_size: int
    store: Store
    timeout_s: float
    first_host: str = "?"

    def note(self, key: str) -> None:
        """Leaves a note; without effect when the store is gone."""
        ask(lambda: self.store.set(key, "1"), otherwise=None)

    def missing(self, key: str, ranks: Iterable[int]) -> list[int]:
        """The ranks that have not left the note `key/RANK`; only rank 0 when the store itself does not answer."""
        wanted = list(ranks)
        return ask(lambda: [r for r in wanted if not self.store.check([f"{key}/{r}"])], otherwise=[0])

    def host(self, rank: int) -> str:
        """The name of a rank's host, "?" when it never came or the store does not answer."""
        if rank == 0:
            return self.first_host
        key = f"host/{rank}"
        return ask(lambda: self.store.get(key).decode() if self.store.check([key]) else "?", otherwise="?")

    def where(self, ranks: Iterable[int]) -> str:
        """Ranks and their hosts in words, e.g. "rank 4 on node07, rank 5 on node07"."""
        known = list(ranks)
        shown = [f"rank {rank} on {self.host(rank)}" for rank in known[:8]]
        return ", ".join(shown) + (f" and {len(known) - 8} more" if len(known) > 8 else "")


@contextmanager
def process_group(
    launch: Launch,
    *,
    gpu: int | None,
    timeout_s: float = 1800.0,
    config: LaunchSection = DEFAULTS,
) -> Iterator[Meeting]:
    """Opens the default process group, and closes it whatever happens inside.

    Without the close, a gloo process was seen to abort at exit in 55 of 80 runs.

    Args:
        launch: from `detect`.
        gpu: index of this process's GPU among those it sees; None on the CPU.
        timeout_s: seconds after which a collective gives up.
        config: the backend, and how long ranks wait for each other here.

    Raises:
        ConfigError: the backend is not there, or the port is taken.
        TrainingError: a rank never came; says which.
    """
    import torch.distributed as dist  # noqa: PLC0415  so that `detect` needs no torch

    chosen = backend_for(config.backend, gpu=gpu, launcher=launch.launcher)
    os.environ.update(_torchrun_variables(launch, gpu))
    meeting, store = _meet(launch, config.timeout)
    start = timedelta(seconds=config.timeout)
    try:
        dist.init_process_group(chosen, store=store, rank=launch.rank, world_size=launch.world_size, timeout=start)
    except (RuntimeError, ValueError) as error:
        raise _not_connected(meeting, error) from None
    try:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
        yield meeting
    except UnreachableError:
        raise
    except BaseException:
        if gpu is None:  # nccl would wait for the collectives of ranks that do not know of this yet
            _close()
        raise
    else:
        if launch.rank == 0 and not ask(lambda: meeting.store.check([STOPPED]), otherwise=True):
            ask(lambda: store.underlying_store.set(OVER, "1"), otherwise=None)
        _close()


def _close() -> None:
    import torch.distributed as dist  # noqa: PLC0415

    if dist.is_initialized():
        dist.destroy_process_group()


def backend_for(name: str, *, gpu: int | None, launcher: str) -> str:
    """torch.distributed's words for a backend.

    Args:
        name: auto is nccl for tensors on a GPU and gloo for those on the CPU; or gloo, nccl or mpi.
        gpu: None on the CPU.
        launcher: who started this process.

    Raises:
        ConfigError: this build of torch, this device or this launcher does not have it.
    """
    import torch.distributed as dist  # noqa: PLC0415

    there = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    if name in there and not there[name]():
        why = "torch was built without it"
        raise ConfigError("launch.backend", name, why=why, remedy="use auto, or a build of torch that has it")
    if name == "nccl" and gpu is None:
        raise ConfigError("launch.backend", name, why="nccl needs a GPU, and none is seen", remedy="use auto or gloo")
    if name == "mpi" and not launcher.startswith("mpirun"):
        why = f"mpi has to be started by mpirun; this was {launcher}"
        raise ConfigError("launch.backend", name, why=why, remedy="use auto, or mpirun")
    if name == "mpi":
        return name
    if gpu is None:
        return "gloo"
    return f"cpu:gloo,cuda:{'gloo' if name == 'gloo' else 'nccl'}"


def ask(question: Callable[[], T], *, otherwise: T, patience_s: float = 5.0) -> T:
    """The answer of the store, or `otherwise` when it has gone or does not answer.

    A store whose process was stopped lets a question wait for ever: it is asked in a thread that is left behind.
    """
    answers: list[T] = []

    def put() -> None:
        try:
            answers.append(question())
        except RuntimeError:  # the connection is gone
            answers.append(otherwise)

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    thread.join(patience_s)
    return answers[0] if answers else otherwise


def _meet(launch: Launch, timeout_s: float) -> tuple[Meeting, PrefixStore]:
    """Opens the store, and waits in it until all ranks are there."""
    import torch.distributed as dist  # noqa: PLC0415

    opened = open_store(launch, timeout_s)
    name = _name_of_start(opened, launch, timeout_s) if _outlives_ranks() else "headrace"
    store = dist.PrefixStore(name, opened)
    # a connection of its own: torch may wait in the other one, and holds it then
    notes = dist.PrefixStore(f"{name}/notes", _another(opened))
    meeting = Meeting(launch.rank, launch.world_size, notes, timeout_s)
    try:
        notes.set(f"host/{launch.rank}", socket.gethostname())
        if notes.add("arrived", 1) == launch.world_size:
            notes.set("complete", "1")
        notes.wait(["complete"], timedelta(seconds=timeout_s))
    except RuntimeError:
        raise _never_came(meeting, launch) from None
    return replace(meeting, first_host=notes.get("host/0").decode()), store


def _outlives_ranks() -> bool:
    """torchrun keeps a store of its own, and starts ranks again on the notes of those that have died."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _name_of_start(store: Store, launch: Launch, timeout_s: float) -> str:
    """A name that the ranks of one start agree on, and no earlier start had.

    torchrun tells none: its restart count is of one agent, and stays the same when nodes come or go. So rank 0 makes a
    name up, and tells it to whoever asks by a number that nobody has asked by before.
    """
    if launch.rank == 0:
        name = f"headrace/{uuid.uuid4().hex}"
        threading.Thread(target=_tell_name, args=(_another(store), name), name="meeting", daemon=True).start()
        return name
    asked = uuid.uuid4().hex
    # in one message, so that nobody who dies here leaves half a question
    store.append(_ASKED, f"{asked} ")  # type: ignore[attr-defined]  # torch has no type for it
    try:
        return store.get(f"headrace/told/{asked}").decode()
    except RuntimeError:
        raise TrainingError(
            f"rank 0 never came to {launch.master} within {timeout_s:g} s; rank {launch.rank} on"
            f" {socket.gethostname()} waited for it\n  try: look for rank 0's error, or raise launch.timeout"
        ) from None


def _tell_name(store: Store, name: str) -> None:
    """Answers all who ask. Those of an earlier start are not there to read it."""
    told: set[str] = set()
    with suppress(RuntimeError):  # torchrun has gone
        while not store.check([f"{name}/notes/complete"]):
            asked = set(store.get(_ASKED).decode().split()) if store.check([_ASKED]) else set()
            for each in asked - told:
                store.set(f"headrace/told/{each}", name)
            told |= asked
            time.sleep(_POLL_S)


def _another(store: Store) -> Store:
    """A connection of its own to the same store."""
    return store.clone()  # type: ignore[attr-defined, no-any-return]  # torch has no type for it


def open_store(launch: Launch, timeout_s: float) -> Store:
    """Connects to where the ranks meet; rank 0 opens it, where torchrun has not.

    Raises:
        ConfigError: the port is taken.
        TrainingError: nobody is there.
    """
    import torch.distributed as dist  # noqa: PLC0415

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = launch.rank == 0 and not _outlives_ranks()
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    try:
        return dist.TCPStore(address, port, launch.world_size, hosts, **options, multi_tenant=hosts)
    except (RuntimeError, ValueError) as error:
        said = str(error).splitlines()[0]
        if launch.rank > 0:
            raise TrainingError(
                f"rank {launch.rank} on {socket.gethostname()} found nobody at {address}:{port} within {timeout_s:g} s:"
                f" rank 0 never came\n  why: {said}\n  try: look for rank 0's error; MASTER_ADDR must be the host of"
                f" rank 0 as the others reach it"
            ) from None
        why = f"the processes could not meet there: {said}"
        remedy = "another run may hold the port: deepspeed --master_port N, torchrun --master-port N, or MASTER_PORT=N"
        raise ConfigError("MASTER_ADDR:MASTER_PORT", f"{address}:{port}", why=why, remedy=remedy) from None


def _never_came(meeting: Meeting, launch: Launch) -> TrainingError:
    absent = meeting.missing("host", range(launch.world_size))
    there = [rank for rank in range(launch.world_size) if rank not in absent]
    if 0 in there:
        meeting = replace(meeting, first_host=ask(lambda: meeting.store.get("host/0").decode(), otherwise="?"))
    text = (
        f"{_ranks(absent)} of {launch.world_size} never came to {launch.master} within {meeting.timeout_s:g} s\n"
        f"  those that came: {meeting.where(there) or 'none'}\n"
        f"  try: look for the error of {_ranks(absent[:1])}, or raise launch.timeout"
    )
    if launch.rank == 0:
        time.sleep(1.0)  # the others read their notes in this process
    return TrainingError(text)


def _not_connected(meeting: Meeting, error: Exception) -> TrainingError:
    return TrainingError(
        f"rank {meeting.rank} on {meeting.host(meeting.rank)} could not connect to the other ranks,"
        f" though all have come: {str(error).splitlines()[0]}\n"
        f"  try: let GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface that the hosts share, and let their"
        f" firewalls pass all ports between them"
    )


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8]) + (", ..." if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _torchrun_variables(launch: Launch, gpu: int | None) -> dict[str, str]:
    """What torch.distributed and DeepSpeed read, whoever started us.

    DeepSpeed takes LOCAL_RANK for the index of the GPU. It is not that where each task sees only its own one.
    """
    address, port = launch.master.rsplit(":", 1)
    return {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(launch.local_rank if gpu is None else gpu),
        "MASTER_ADDR": address,
        "MASTER_PORT": port if port != "0" else str(free_port()),
    }


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
