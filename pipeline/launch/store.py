"""How the ranks of a start meet: a store in which each says that it has come, and whoever does not come is named.

torch.distributed would say "timed out waiting for clients, 3/4 joined". Here every rank leaves its host's name, before
anything else; who is missing can then be read there.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ConfigError, LostError
from pipeline.launch.arrivals import Rendezvous, ask, listed
from pipeline.launch.environment import Launch
from pipeline.launch.missing_ranks import ends_after, kill_stopped

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store

SPARE_S = 2.0
"""Seconds more than torch's own timeout, which knows better what to say, where it works."""
_ASKED = "headrace/asked"
_POLL_S = 0.02


def meet(launch: Launch, timeout_s: float) -> tuple[Rendezvous, PrefixStore]:
    """Opens the store, and waits in it until all ranks are there.

    A rank 0 that is stopped lets every question to its store wait for ever, and the store's own timeouts too: they ask
    it to forget the question. So these end with the process.

    Raises:
        ConfigError: the port is taken.
        LostError: a rank never came; says which.
    """
    import torch.distributed as dist  # noqa: PLC0415

    with ends_after(timeout_s + SPARE_S, lambda: _no_answer(launch, timeout_s)):
        opened = open_store(launch, timeout_s)
        name = _name_of_start(opened, launch, timeout_s) if _outlives_ranks() else "headrace"
        store = dist.PrefixStore(name, opened)
        # a connection of its own: torch may wait in the other one, and holds it then
        notes = dist.PrefixStore(f"{name}/notes", _another(opened))
    meeting = Rendezvous(launch.rank, launch.world_size, notes, timeout_s)
    try:
        with ends_after(timeout_s + SPARE_S, lambda: _no_answer(launch, timeout_s)):
            notes.set(f"host/{launch.rank}", socket.gethostname())
            if notes.add("arrived", 1) == launch.world_size:
                notes.set("complete", "1")
            notes.wait(["complete"], timedelta(seconds=timeout_s))
            return replace(meeting, first_host=notes.get("host/0").decode()), store
    except RuntimeError:
        raise _never_came(meeting, launch) from None


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
        kill_stopped([0])
        raise LostError(
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
        LostError: nobody is there.
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
            kill_stopped([0])
            raise LostError(
                f"rank {launch.rank} on {socket.gethostname()} found nobody at {address}:{port} within {timeout_s:g} s:"
                f" rank 0 never came\n  why: {said}\n  try: look for rank 0's error; MASTER_ADDR must be the host of"
                f" rank 0 as the others reach it"
            ) from None
        why = f"the processes could not meet there: {said}"
        remedy = "another run may hold the port: deepspeed --master_port N, torchrun --master-port N, or MASTER_PORT=N"
        raise ConfigError("MASTER_ADDR:MASTER_PORT", f"{address}:{port}", why=why, remedy=remedy) from None


def _no_answer(launch: Launch, timeout_s: float) -> LostError:
    kill_stopped([0])
    return LostError(
        f"rank 0 at {launch.master} did not answer within {timeout_s:g} s; rank {launch.rank} on"
        f" {socket.gethostname()} waited for it\n  why: it never came, or it or its host was stopped\n"
        f"  try: look at that host and at the rank's own error; start without it, or raise launch.timeout"
    )


def _never_came(meeting: Rendezvous, launch: Launch) -> LostError:
    absent = meeting.missing("host", meeting.everyone)
    there = [rank for rank in meeting.everyone if rank not in absent]
    if 0 in there:
        meeting = replace(meeting, first_host=ask(lambda: meeting.store.get("host/0").decode(), otherwise="?"))
    text = (
        f"{listed(absent)} of {launch.world_size} never came to {launch.master} within {meeting.timeout_s:g} s\n"
        f"  those that came: {meeting.where(there) or 'none'}\n"
        f"  try: look for the error of {listed(absent[:1])}, or raise launch.timeout"
    )
    if launch.rank == 0:
        time.sleep(1.0)  # the others read their notes in this process
    kill_stopped(absent)
    return LostError(text)
