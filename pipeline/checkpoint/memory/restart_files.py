"""Files that a restart reads: verified copies in the nodes' memory, or else files in the run's directory.

find    all ranks   the ranks of a node divide the copies in its memory, and compare size and SHA-256 with the
                    checkpoint's manifest; every rank learns where copies are. Files without a verified copy
                    are verified in the run's directory (`damage.find_damage_collective`)
opened  all ranks   serve their copies to other nodes while an engine reads
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from foundation.directory import sha256_of_file
from pipeline.checkpoint.memory.memory_folder import MemoryFolder
from pipeline.checkpoint.memory.memory_server import Client, MemoryServerAddress, served
from pipeline.checkpoint.memory.shard_files import FolderSource, NodeSource, ReadBytes, ShardFiles, ShardSource

_HASH_THREADS = 4


@dataclass(frozen=True)
class _VerifiedCopies:
    """The verified copies of one checkpoint.

    Attributes:
        here: names of the files with a copy in this node's memory.
        elsewhere: file name -> a rank of another node that has verified its copy.
        own: names of the files whose copies this rank has verified.
    """

    here: frozenset[str] = frozenset()
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    own: frozenset[str] = frozenset()


class RestartFiles:
    """Finds and opens the files of a restart. If `memory` is a folder, the constructor is collective.

    Args:
        memory: folder of the run in this node's memory; None to read only from the run's directory.
        master: host of rank 0.
        port: port of the rendezvous on `master`; 0 if there is no rendezvous.
        warn: called with warnings for people, on every rank.
        on_progress: called while copies are read.

    Attributes:
        reads: bytes that this rank has read, by source.
    """

    def __init__(
        self,
        memory: MemoryFolder | None = None,
        *,
        master: str = "127.0.0.1",
        port: int = 0,
        warn: Callable[[str], None] = lambda _line: None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.reads = ReadBytes()
        self._memory, self._master, self._port = memory, master, port
        self._say, self._on_progress = warn, on_progress
        self._warnings: list[str] = []
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        nodes = _gathered(memory.identity()) if memory is not None else [None]
        self._here = [rank for rank, node in enumerate(nodes) if node == nodes[self._rank if memory else 0]]
        self._found: dict[Path, _VerifiedCopies] = {}

    @property
    def ranks_here(self) -> int:
        """Ranks of this run that use this node's folder."""
        return len(self._here)

    def find(self, path: Path, step: int, files: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
        """Returns the files of a checkpoint that have a verified copy on some node. Collective.

        A damaged copy is removed with a warning.

        Args:
            path: directory of the checkpoint.
            step: step of the checkpoint.
            files: file name -> its entry in the manifest; empty if the manifest is damaged.
        """
        if self._memory is None:
            return frozenset()
        memory, listed = self._memory, _gathered(self._memory.sizes(step))[self._here[0]]
        mine = sorted(name for name in listed if name in files)[self._here.index(self._rank) :: self.ranks_here]

        def is_intact(name: str) -> bool:
            try:
                return listed[name] == files[name]["bytes"] and self._sha256(memory.folder(step) / name) == str(
                    files[name]["sha256"]
                )
            except OSError:
                return False

        with ThreadPoolExecutor(_HASH_THREADS) as threads:
            intact = dict(zip(mine, threads.map(is_intact, mine), strict=True))
        for name in (name for name, good in intact.items() if not good):
            (memory.folder(step) / name).unlink(missing_ok=True)
            where = f"in the memory of {socket.gethostname()}"
            self._warn(f"the copy of {path.name}/{name} {where} is damaged; the file itself is read")
        own = frozenset(name for name, good in intact.items() if good)
        holders = _gathered(own)
        here = frozenset(name for rank in self._here for name in holders[rank])
        elsewhere = {name: rank for rank, names in enumerate(holders) for name in names if name not in here}
        self._found[path] = _VerifiedCopies(here, elsewhere, own)
        return here | elsewhere.keys()

    def chosen(self, step: int | None) -> None:
        """Removes the copies of all checkpoints but the resumed one. Must be called after `find`, on all ranks."""
        if self._memory is not None and self._rank == self._here[0]:
            self._memory.keep_only(step)

    @contextmanager
    def opened(self, path: Path, files: Mapping[str, Mapping[str, Any]]) -> Iterator[ShardFiles]:
        """Opens the files of a checkpoint, preferring copies that `find` has verified. Collective.

        No rank may leave the block before all ranks have read their data (`named_state.read` is collective).

        Args:
            path: directory of the checkpoint.
            files: file name -> its entry in the manifest.
        """
        found = self._found.get(path, _VerifiedCopies())
        copies: dict[str, ShardSource] = {}
        with ExitStack() as stack:
            if self._memory is not None:
                folder = self._memory.folder(int(path.name.rpartition("-")[2]))
                copies |= dict.fromkeys(found.here, FolderSource("memory", folder))
                if len(self._here) < (dist.get_world_size() if dist.is_initialized() else 1):
                    copies |= self._elsewhere(stack, found, folder)
            yield ShardFiles(path, copies, files=files, reads=self.reads, warn=self._warn)

    def report(self) -> tuple[dict[str, int], list[str]]:
        """Returns the bytes that all ranks have read since the last call, by source, and their warnings. Collective."""
        everyone = _gathered((self.reads.values(), self._warnings))
        self._warnings = []
        self.reads.clear()
        total = {name: sum(each[name] for each, _ in everyone) for name in everyone[0][0]}
        return total, [line for _, lines in everyone for line in lines]

    def _warn(self, line: str) -> None:
        self._warnings.append(line)
        self._say(f"warning: {line}")

    def _elsewhere(self, stack: ExitStack, found: _VerifiedCopies, folder: Path) -> dict[str, ShardSource]:
        """Serves this rank's verified copies, and connects to other nodes' copies when they are first read."""
        own: MemoryServerAddress | None = None
        try:
            if found.own:
                files = {name: folder / name for name in found.own}
                own = stack.enter_context(served(files, master=self._master, port=self._port))
        except OSError as error:
            self._warn(f"the checkpoint copies of this node cannot be served to other nodes: {error}")
        servers = _gathered(own)
        clients: dict[int, NodeSource] = {}
        for rank in set(found.elsewhere.values()):
            if (address := servers[rank]) is not None:
                clients[rank] = NodeSource(Client(address))
                stack.callback(clients[rank].client.close)
        return {name: clients[rank] for name, rank in found.elsewhere.items() if rank in clients}

    def _sha256(self, path: Path) -> str:
        def read(nbytes: int) -> None:
            self.reads.add("memory", nbytes)
            self._on_progress()

        return sha256_of_file(path, read)


def _gathered(own: Any) -> list[Any]:
    """Gathers a value from all ranks, by rank. Collective."""
    if not dist.is_initialized():
        return [own]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone
