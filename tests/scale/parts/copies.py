"""Checkpoint copies in host memory: which rank learns of which copy, and reads it where, after a restart."""

from __future__ import annotations

import hashlib
import pickle
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipeline.checkpoint.memory import restart_files
from pipeline.checkpoint.memory.memory_folder import MemoryFolder
from pipeline.checkpoint.memory.memory_server import MemoryServerAddress
from pipeline.checkpoint.memory.restart_files import RestartFiles
from tests.scale.measuring import Figures, Part, measured

_PER_NODE, _STEP = 8, 400


class Neighbours:
    """What the ranks of all other nodes give in a collective, of the kind that the first rank of one node gives.

    Args:
        ranks: number of ranks; this process is rank 0.

    Attributes:
        bytes: bytes received by this rank.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.bytes = 0

    def gathered(self, own: Any) -> list[Any]:
        """In the place of `dist.all_gather_object`: what it receives is unpickled, as there."""
        received = [pickle.dumps(self._of(rank, own)) for rank in range(1, self._ranks)]
        self.bytes += sum(map(len, received))
        return [own, *map(pickle.loads, received)]

    def _of(self, rank: int, own: Any) -> Any:
        node = rank // _PER_NODE
        names = [_name(node * _PER_NODE + each) for each in range(_PER_NODE)]
        match own:
            case (str(), int(), int()):  # identity of the node's folder
                return own if node == 0 else (f"boot-{node}", *own[1:])
            case dict():  # sizes of the node's copies
                return dict.fromkeys(names, 8)
            case frozenset():  # those that the rank has verified
                return frozenset([_name(rank)])
            case MemoryServerAddress():
                return replace(own, hosts=(f"10.0.{node // 256}.{node % 256}", f"node{node:04}"))
        raise NotImplementedError(own)


def _name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def restarted(ranks: int, work: Path) -> Figures:
    """A rank learns which node has a verified copy of which file, and opens all of them."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())
    neighbours, memory = Neighbours(ranks), MemoryFolder.of(str(work), work / "run")
    memory.folder(_STEP).mkdir(parents=True)
    files: dict[str, dict[str, Any]] = {}
    for rank in range(ranks):
        content = f"{rank:08d}".encode()
        files[_name(rank)] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        if rank < _PER_NODE:
            (memory.folder(_STEP) / _name(rank)).write_bytes(content)
    checkpoint = work / "run" / f"step-{_STEP:08d}"
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(restart_files, "_gathered", neighbours.gathered)
        with measured() as figures:
            found = RestartFiles(memory)
            assert found.ranks_here == _PER_NODE
            assert found.find(checkpoint, _STEP, files) == files.keys()
            opened = stack.enter_context(found.opened(checkpoint, files))
        assert len(opened._copies) == ranks
    figures.messages = 4 * ranks  # four collectives
    figures.read_bytes = neighbours.bytes
    return figures


PARTS = [
    Part(
        "checkpoint copies: restart",
        "a rank learns which node has a verified copy of which file in memory, and opens all copies; its own node"
        " verifies its eight copies, of a few bytes each here. The bytes are those of four collectives of Python"
        " objects.",
        "ranks",
        (1024, 2048, 4096, 8192),
        8192,
        restarted,
        note="A rank connects only to nodes whose copies it reads: see *resume* above, with as many files.",
    ),
]
