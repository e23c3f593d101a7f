"""Opens the rendezvous: a store in which every rank registers its host name, so errors can name missing ranks.

torch.distributed would say "timed out waiting for clients, 3/4 joined". Here every rank writes its host name before
anything else, so the store shows which ranks are missing.
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

from foundation.errors import ConfigError, LostError
from foundation.processes import raise_file_limit
from pipeline.runtime.launch.environment import Launch
from pipeline.runtime.launch.missing_ranks import exit_after, kill_stopped
from pipeline.runtime.launch.rank_devices import RankDevice, check_devices, register
from pipeline.runtime.launch.rendezvous import Rendezvous, format_ranks, mark, store_call

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store

EXTRA_S = 2.0
"""Seconds added to torch's own timeout, whose error message is better where it works."""
_FILES_PER_RANK, _OWN_FILES = 2, 256
"""Number of each rank's connections to the store in rank 0's process, and of other files that this process opens."""
_REQUESTS = "headrace/prefix-requests"
_POLL_S = 0.02


def open_rendezvous(
    launch: Launch, timeout_s: float, *, device: RankDevice | None = None
) -> tuple[Rendezvous, PrefixStore]:
    """Opens the store, and waits in it until all ranks have joined.

    A stopped rank 0 (SIGSTOP) blocks every request to its store forever. It also blocks the store's own timeouts, which
    send it a cancellation. So a timer ends the process.

    Args:
        launch: launch of this process.
        timeout_s: seconds to wait until all ranks have joined.
        device: this rank's device, to compare with the other ranks' devices; None for no comparison.

    Raises:
        ConfigError: the port is taken, or `check_devices` refuses the devices.
        LostError: a rank did not join; the error names it.
    """
    import torch.distributed as dist  # noqa: PLC0415

    _check_open_files(launch)
    with exit_after(timeout_s + EXTRA_S, lambda: _no_answer(launch, timeout_s)):
        base_store = open_store(launch, timeout_s)
        prefix = _prefix_of_start(base_store, launch, timeout_s) if _outlives_ranks() else "headrace"
        store = dist.PrefixStore(prefix, base_store)
        # a separate connection: torch may block in the other one while it holds that connection's lock
        flags = dist.PrefixStore(f"{prefix}/notes", _clone(base_store))
    rendezvous = Rendezvous(launch.rank, launch.world_size, flags, timeout_s)
    try:
        with exit_after(timeout_s + EXTRA_S, lambda: _no_answer(launch, timeout_s)):
            flags.set(f"host/{launch.rank}", socket.gethostname())
            flags.add(f"ranks_on/{socket.gethostname()}", 1)
            if device is not None:
                register(flags, launch.rank, device)
            mark(flags, "joined", launch.rank)
            if flags.add("arrived", 1) == launch.world_size:
                flags.set("complete", "1")
            flags.wait(["complete"], timedelta(seconds=timeout_s))
            here = flags.add(f"ranks_on/{socket.gethostname()}", 0)
            rendezvous = replace(rendezvous, rank_zero_host=flags.get("host/0").decode(), ranks_here=here)
            check_devices(rendezvous)
            return rendezvous, store
    except RuntimeError:
        raise _not_joined(rendezvous, launch) from None


def _check_open_files(launch: Launch) -> None:
    """Raises this process's limit of open files; refuses a number of ranks too large for rank 0's limit.

    Raises:
        ConfigError: the hard limit is too low.
    """
    limit, needed = raise_file_limit(), _FILES_PER_RANK * launch.world_size + _OWN_FILES
    if launch.rank == 0 and limit < needed and not _outlives_ranks():
        why = f"{launch.world_size:,} ranks connect to rank 0, and each takes {_FILES_PER_RANK} of its open files"
        remedy = f"raise the hard limit on {socket.gethostname()}, in /etc/security/limits.conf or by LimitNOFILE"
        raise ConfigError("ulimit -Hn", limit, why=f"{why}: {needed:,} are needed", remedy=remedy)


def _outlives_ranks() -> bool:
    """Tells whether the store is torchrun's, which keeps the keys of dead ranks across restarts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _prefix_of_start(store: Store, launch: Launch, timeout_s: float) -> str:
    """Agrees on a key prefix that the ranks of one start share and no earlier start has used.

    torchrun provides none: its restart count is per agent, and stays the same when nodes come or go. So rank 0 makes a
    random prefix, and sends it to every rank that asks with a random request id of its own.
    """
    if launch.rank == 0:
        prefix = f"headrace/{uuid.uuid4().hex}"
        threading.Thread(target=_serve_prefix, args=(_clone(store), prefix), name="rendezvous", daemon=True).start()
        return prefix
    request = uuid.uuid4().hex
    # one message: a rank that dies here leaves no partial request
    store.append(_REQUESTS, f"{request} ")  # type: ignore[attr-defined]  # torch has no type for it
    try:
        return store.get(f"headrace/prefix/{request}").decode()
    except RuntimeError:
        kill_stopped([0])
        raise LostError(
            f"rank 0 did not join the rendezvous at {launch.master} within {timeout_s:g} s; rank {launch.rank} on"
            f" {socket.gethostname()} waited for it\n  try: look for rank 0's error, or raise launch.timeout"
        ) from None


def _serve_prefix(store: Store, prefix: str) -> None:
    """Answers all requests for the prefix, including unread ones from an earlier start."""
    answered: set[str] = set()
    with suppress(RuntimeError):  # torchrun is gone
        while not store.check([f"{prefix}/notes/complete"]):
            requests = set(store.get(_REQUESTS).decode(errors="replace").split()) if store.check([_REQUESTS]) else set()
            for request in requests - answered:
                store.set(f"headrace/prefix/{request}", prefix)
            answered |= requests
            time.sleep(_POLL_S)


def _clone(store: Store) -> Store:
    """Opens another connection to the store."""
    return store.clone()  # type: ignore[attr-defined, no-any-return]  # torch has no type for it


def open_store(launch: Launch, timeout_s: float) -> Store:
    """Connects to the store; rank 0 hosts it, unless torchrun does.

    Raises:
        ConfigError: the port is taken.
        LostError: no store can be reached.
    """
    import torch.distributed as dist  # noqa: PLC0415

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts_store = launch.rank == 0 and not _outlives_ranks()
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    try:
        return dist.TCPStore(address, port, launch.world_size, hosts_store, **options, multi_tenant=hosts_store)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if launch.rank > 0:
            kill_stopped([0])
            raise LostError(
                f"rank {launch.rank} on {socket.gethostname()} could not connect to {address}:{port} within"
                f" {timeout_s:g} s: rank 0 did not join\n  why: {reason}\n  try: look for rank 0's error; MASTER_ADDR"
                f" must be the host of rank 0 as the others reach it"
            ) from None
        why = f"the rendezvous store could not be opened there: {reason}"
        remedy = "another run may hold the port: deepspeed --master_port N, torchrun --master-port N, or MASTER_PORT=N"
        raise ConfigError("MASTER_ADDR:MASTER_PORT", f"{address}:{port}", why=why, remedy=remedy) from None


def _no_answer(launch: Launch, timeout_s: float) -> LostError:
    kill_stopped([0])
    return LostError(
        f"rank 0 at {launch.master} did not answer within {timeout_s:g} s; rank {launch.rank} on"
        f" {socket.gethostname()} waited for it\n  why: it did not join, or it or its host was stopped\n"
        f"  try: check that host and the rank's own error; start without it, or raise launch.timeout"
    )


def _not_joined(rendezvous: Rendezvous, launch: Launch) -> LostError:
    missing = rendezvous.ranks_without("joined", rendezvous.ranks)
    joined = [rank for rank in rendezvous.ranks if rank not in missing]
    if 0 in joined:
        host = store_call(lambda: rendezvous.store.get("host/0").decode(), default="?")
        rendezvous = replace(rendezvous, rank_zero_host=host)
    text = (
        f"{format_ranks(missing)} of {launch.world_size} did not join the rendezvous at {launch.master} within"
        f" {rendezvous.timeout_s:g} s\n"
        f"  joined: {rendezvous.describe(joined) or 'none'}\n"
        f"  try: look for the error of {format_ranks(missing[:1])}, or raise launch.timeout"
    )
    if launch.rank == 0:
        time.sleep(1.0)  # the other ranks still read flags from the store in this process
    kill_stopped(missing)
    return LostError(text)
