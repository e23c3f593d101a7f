"""Makes the island to which a rank belongs."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist

from foundation.errors import ConfigError
from pipeline.config.sections.groups import IslandsSection, QuorumSection
from pipeline.engines.base import Engine
from pipeline.run.groups.islands.asynchronous import AsynchronousIsland
from pipeline.run.groups.islands.context import IslandContext, Loader
from pipeline.run.groups.islands.island import Island
from pipeline.run.groups.islands.ledger import Member, PlainReport
from pipeline.run.groups.islands.lighthouse import LighthouseMember, R
from pipeline.run.groups.islands.local import LocalIsland
from pipeline.run.groups.islands.outer import layout_digest
from pipeline.run.groups.islands.peers import Peers, PeerStore
from pipeline.run.groups.islands.wire import HolderClient
from pipeline.run.rank_of_run import RankOfRun

LEAST_SECRET_BYTES = 16


def check_island(section: QuorumSection | None, *, field: str = "islands") -> None:
    """Refuses an island or a replica on a host without its requirements, before process groups are opened.

    Args:
        section: the config's section `islands` or `replicas`; None without one.
        field: name of the section.

    Raises:
        ConfigError: torchft is not installed, or the secret cannot be used.
    """
    if section is None or section.name is None:
        return
    read_secret(section, field=field)
    asynchronous = isinstance(section, IslandsSection) and section.mode == "asynchronous"
    if not asynchronous and find_spec("torchft") is None:
        raise ConfigError(field, why="torchft is not installed", remedy="pip install torchft")


def read_secret(section: QuorumSection, *, field: str = "islands") -> bytes:
    """Reads the secret of `secret_file`, without surrounding white space; empty without a file.

    Raises:
        ConfigError: the secret cannot be read, is too short, or is readable by other users.
    """
    if section.secret_file is None:
        return b""
    name = f"{field}.secret_file"
    path, remedy = Path(section.secret_file), "head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE"
    try:
        secret, mode = path.read_bytes().strip(), path.stat().st_mode
    except OSError as error:
        raise ConfigError(name, str(path), why=str(error), remedy=remedy) from None
    if len(secret) < LEAST_SECRET_BYTES:
        why = f"it has {len(secret)} bytes, and a secret needs {LEAST_SECRET_BYTES} or more"
        raise ConfigError(name, str(path), why=why, remedy=remedy)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        why = "other users of this host may read it"
        raise ConfigError(name, str(path), why=why, remedy=f"chmod 600 {path}")
    return secret


def open_island(here: RankOfRun, *, loader: Loader) -> LocalIsland | None:
    """Opens the island of this rank; None for an ordinary run. Collective.

    Args:
        here: this rank; its stack closes the island, its checkpoint has the outer state.
        loader: makes this rank's batches.
    """
    run, section = here.run, here.run.config.islands
    if section is None or section.name is None:
        return None
    context = IslandContext(
        section=section,
        total=run.steps,
        schedule=run.schedule,
        samples=run.batch.samples,
        layout=curve_and_layout_digest(here.engine, here.curve),
        rank=here.rank,
        engine=here.engine,
        agreement=here.agreement,
        signals=here.signals,
        watchdog=here.watchdog,
        record=here.record,
        say=here.say,
    )
    step = here.checkpoint.step if here.checkpoint else 0
    make = _synchronous if section.mode == "synchronous" else _asynchronous
    island = make(context, loader, step, here.stack)
    here.stack.callback(island.close)
    if here.checkpoint is not None:
        details = here.checkpoint.manifest.details
        island.load(here.checkpoint.path, details.get("island"), samples=details["samples"])
    return island


def curve_and_layout_digest(engine: Engine, curve: Any, *, of_rank: str = "") -> str:
    """Computes a digest of the keys that determine a run's loss curve, and of all ranks' shards. Collective.

    Args:
        engine: this rank's engine.
        curve: values that must be equal in all groups, as JSON.
        of_rank: text about this rank that must be equal on the same rank of all groups.
    """
    with engine.edit_state() as state:
        own = f"{layout_digest(state)} {of_rank}"
    digests: list[Any] = [own]
    if dist.is_initialized():
        digests *= dist.get_world_size()
        dist.all_gather_object(digests, own)
    text = json.dumps(curve, sort_keys=True, default=str) + " ".join(digests)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def reach_others(
    section: QuorumSection, *, rank: int, parse: Callable[[PlainReport], R], stack: ExitStack, field: str = "islands"
) -> tuple[LighthouseMember[R] | None, Peers]:
    """Makes a rank's connections to its peers in other islands or replicas and, on rank 0, to the lighthouse.

    Args:
        section: the config's section, with a name.
        rank: rank of this process in its group.
        parse: parses a report from JSON.
        stack: keeps the store alive in which peers find each other.
        field: name of the section.

    Raises:
        ConfigError: the secret cannot be read, is too short, or other users can read it.
    """
    assert section.name is not None
    # by default torchft's client reports every request on stderr
    os.environ.setdefault("RUST_LOG", "warn")
    secret, lighthouse = read_secret(section, field=field), None
    if rank == 0:
        store = PeerStore(section.bind)
        stack.callback(lambda: store)  # the store lives as long as the group
        lighthouse = LighthouseMember(section.lighthouse, section.name, store=store.address, secret=secret, parse=parse)
    return lighthouse, Peers(bind=section.bind, timeout_s=section.timeout_s, secret=secret)


def _synchronous(context: IslandContext, loader: Loader, step: int, stack: ExitStack) -> LocalIsland:
    lighthouse, peers = reach_others(context.section, rank=context.rank, parse=Member.from_plain, stack=stack)
    return Island(context, peers=peers, lighthouse=lighthouse, loader=loader, step=step)


def _asynchronous(context: IslandContext, loader: Loader, step: int, _stack: ExitStack) -> LocalIsland:
    section = context.section
    connect = partial(HolderClient, section.lighthouse, secret=read_secret(section), timeout_s=section.timeout_s)
    return AsynchronousIsland(context, connect=connect, loader=loader, step=step)
