"""Harness of the benchmarks: candidates alternate in one run, and tables show medians with quartiles.

A machine's speed drifts. So all candidates run once in each round, in rotated order, and ratios are within one round.
torch is imported only when needed: `benchmarks.planner` times its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Seconds(NamedTuple):
    """Wall-clock time of some work, and this process's CPU time, which other processes do not lengthen."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Seconds:
        """Reads both clocks."""
        return cls(time.perf_counter(), time.process_time())

    @classmethod
    def since(cls, began: Seconds) -> Seconds:
        """Time from another reading of the clocks until now."""
        return cls(time.perf_counter() - began.wall, time.process_time() - began.cpu)

    @classmethod
    def of(cls, work: Callable[[], object]) -> Seconds:
        """Runs and times a function."""
        began = cls.now()
        work()
        return cls.since(began)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Makes a parser whose help is the module's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def alternate(
    candidates: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    warmup: int = 1,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[T]]:
    """Runs every candidate once per round.

    Args:
        candidates: functions to run, by name; each returns a result.
        rounds: number of rounds whose results are kept.
        warmup: number of earlier rounds, in which buffers are made and layers compiled.
        before: function called before every run.

    Returns:
        Results of the kept rounds, by name.
    """
    names, found = [*candidates], {name: list[T]() for name in candidates}
    for number in range(warmup + rounds):
        first = number % len(names)  # rotated: no candidate always follows the same one
        for name in names[first:] + names[:first]:
            before()
            result = candidates[name]()
            if number >= warmup:
                found[name].append(result)
    return found


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median and quartiles; only the value if there is a single one."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """Median and quartiles of the ratios within each round."""
    return spread([a / b for a, b in zip(values, others, strict=True)])


def print_head(*columns: str) -> None:
    """Prints the head of a table in Markdown."""
    print_row(*columns)
    print("|---" * len(columns) + "|", flush=True)


def print_row(*cells: object) -> None:
    """Prints a row of a table in Markdown."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_load() -> None:
    """Prints how busy the machine is."""
    print(f"load average: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", flush=True)


@contextmanager
def work_folder(parent: str | Path | None = None) -> Iterator[Path]:
    """A temporary folder."""
    with tempfile.TemporaryDirectory(prefix="headrace-", dir=parent) as folder:
        yield Path(folder)


def last_json(command: Sequence[object], **options: Any) -> Any:
    """Runs a program, and parses the last line that it prints as JSON."""
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=True, **options)
    return json.loads(done.stdout.splitlines()[-1])


def on_ranks(measure: Callable[..., T], ranks: int, *arguments: Any) -> T:
    """Runs `measure(rank, *arguments)` in one-threaded processes connected by gloo; returns rank 0's result."""
    from torch import multiprocessing  # noqa: PLC0415

    with work_folder() as folder:
        multiprocessing.spawn(_rank, args=(folder, measure, ranks, arguments), nprocs=ranks)
        found: T = pickle.loads((folder / "result").read_bytes())
    return found


def _rank(rank: int, folder: Path, measure: Callable[..., object], ranks: int, arguments: tuple[Any, ...]) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = measure(rank, *arguments)
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def cpu_engine(config: dict[str, Any], ranks: int) -> tuple[Any, Any]:
    """Builds the model of a config on meta, and its engine on this rank's CPU."""
    import torch  # noqa: PLC0415

    from foundation.section import parse  # noqa: PLC0415
    from pipeline.config.rules.resolve import resolve  # noqa: PLC0415
    from pipeline.config.sections.run import Config  # noqa: PLC0415
    from pipeline.engines.build import build_engine  # noqa: PLC0415
    from pipeline.engines.objective import CrossEntropy  # noqa: PLC0415
    from pipeline.models.attention import ATTENTION_NAME  # noqa: PLC0415
    from pipeline.models.construction.initial_values import InitByName  # noqa: PLC0415
    from pipeline.models.construction.meta import build_meta  # noqa: PLC0415
    from pipeline.models.hf_config import resolve_hf_config  # noqa: PLC0415

    run = resolve(parse(Config, config), world_size=ranks)
    section, length = run.config.model, run.config.data.sequence_length
    hf = resolve_hf_config(section, tokenizer={"vocab_size": section.config["vocab_size"]}, sequence_length=length)
    model = build_meta(hf, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    return model, build_engine(run, model, InitByName(model, seed=0), CrossEntropy(), device=torch.device("cpu"))


def llama(*, hidden: int, layers: int, heads: int = 4, mlp: int = 3, **fields: int) -> dict[str, Any]:
    """A llama as a config's `model`; `mlp` is the MLP's width divided by the model's."""
    sizes = {"hidden_size": hidden, "intermediate_size": mlp * hidden, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": heads}
    return {"config": {"model_type": "llama", **sizes, **attention, **fields}}
