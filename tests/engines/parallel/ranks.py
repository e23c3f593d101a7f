"""Four persistent gloo processes that run one function after another: starting a process takes seconds."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 4
PRELOADED = ["torch", "transformers.models.llama.modeling_llama", "pipeline.engines.parallel.assemble"]
"""Modules imported by the fork server, once for all instances of `Ranks`."""


class Ranks:
    """`WORLD` processes with an initialized gloo process group."""

    def __init__(self, folder: str) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, f"file://{folder}/store", theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `function(rank, *args)` on every rank; returns the results. The function must be importable by name."""
        for pipe in self._pipes:
            pipe.send((function, args))
        replies = [pipe.recv() for pipe in self._pipes]
        errors = [text for kind, text in replies if kind == "error"]
        assert not errors, errors[0]
        return [value for _, value in replies]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(timeout=20)
            if process.is_alive():
                process.kill()


def _serve(rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send(("value", function(rank, *args)))
        except BaseException:
            pipe.send(("error", f"rank {rank}: {traceback.format_exc()}"))
    os._exit(0)  # shutting gloo down in four processes at once takes seconds, and nothing needs to be saved


def group_of(rank: int, size: int) -> dist.ProcessGroup | None:
    """This rank's process group of `size` consecutive ranks; None for size 1. Collective."""
    if size == 1:
        return None
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, WORLD, size)]
    return groups[rank // size]
