"""Benchmark of Muon's update on several ranks of a CPU: its share of a step, against AdamW and against no dealing.

    python -m benchmarks.muon [--ranks 4] [--steps 6] [--hidden 256] [--tokens 8192]

The same model is trained by engine torch with FSDP2 (stage 3, gloo) in one launch, in turns: with AdamW, with Muon,
whose matrices are dealt over the ranks, and with Muon where every rank gathers all momenta and orthogonalizes every
matrix itself. Medians over steps of the CPU seconds of all ranks together: the whole step, and the optimizer's update
in it. They do not depend on what else runs on the machine; the clock's times of the slowest rank stand beside them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from headrace.base.section import parse
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config
from pipeline.data.micro_batch import MicroBatch, StepBatch
from pipeline.engines.build import build_engine
from pipeline.engines.common import model_dtype
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.optim.matrix_exchange import MatrixExchange
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.construction.initial_values import InitByName
from pipeline.models.construction.meta import build_meta
from pipeline.models.hf_config import resolve_hf_config
from pipeline.models.hidden_matrices import MatrixForm

VOCABULARY, LENGTH, WARM_UP = 1024, 256, 2
KINDS = ("adamw", "muon", "muon, every rank alone")


def main() -> None:
    """Runs the benchmark and prints its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each kind")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size; the MLP has three times as many features")
    parser.add_argument("--tokens", type=int, default=8192, help="per step, over all ranks")
    arguments = parser.parse_args()
    print(f"load average at the start: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        mp.start_processes(_rank, args=(arguments, store), nprocs=arguments.ranks, start_method="fork")
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")


def _rank(rank: int, arguments: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    engines = {kind: _Timed(kind, arguments) for kind in KINDS}
    for number in range(WARM_UP + arguments.steps):
        for engine in engines.values():
            engine.step(number + 1)
    if rank == 0:
        _report(engines, arguments)
    dist.barrier()
    dist.destroy_process_group()


def _report(engines: dict[str, _Timed], arguments: argparse.Namespace) -> None:
    plain, own = engines["adamw"].steps.cpu, engines["muon"]
    print(f"{arguments.ranks} ranks, {own.parameters / 1e6:.2f}M parameters, {own.matrices:.0%} of them in matrices,")
    print(f"hidden size {arguments.hidden}, {arguments.tokens:,} tokens per step, fp32")
    for kind, engine in engines.items():
        for name, times in (("step", engine.steps), ("update", engine.updates)):
            cpu = times.cpu
            print(f"  {kind:24} {name:6} {cpu:8.3f} CPU s = {cpu / plain:.3f} of a step; {times.clock:.3f} s")
    print(f"work of the busiest rank over the mean: {max(own.shares) / (sum(own.shares) / len(own.shares)):.3f}")


class _Times:
    """Seconds of something, step by step."""

    def __init__(self) -> None:
        self._clock: list[float] = []
        self._cpu: list[float] = []

    def measure(self, what: Callable[[], object]) -> None:
        """Does it, and adds its times. Collective."""
        dist.barrier()  # what a rank waits for is not its own
        began = time.perf_counter(), time.process_time()
        what()
        found = [
            torch.tensor(now - then, dtype=torch.float64)
            for now, then in zip((time.perf_counter(), time.process_time()), began, strict=True)
        ]
        dist.all_reduce(found[0], op=dist.ReduceOp.MAX)
        dist.all_reduce(found[1])
        self._clock.append(float(found[0]))
        self._cpu.append(float(found[1]))

    @property
    def clock(self) -> float:
        """Median of the slowest rank."""
        return median(self._clock[WARM_UP:])

    @property
    def cpu(self) -> float:
        """Median of all ranks together."""
        return median(self._cpu[WARM_UP:])


class _Timed:
    """An engine whose steps and updates are timed, by the slowest rank.

    Args:
        kind: of `KINDS`.
        arguments: of the command line.
    """

    def __init__(self, kind: str, arguments: argparse.Namespace) -> None:
        self._run, self._tokens = _resolved(kind, arguments), arguments.tokens
        hf = resolve_hf_config(self._run.config.model, tokenizer={"vocab_size": VOCABULARY}, sequence_length=LENGTH)
        model = build_meta(hf, dtype=model_dtype(self._run.config), attn_implementation=ATTENTION_NAME)
        self.parameters = sum(p.numel() for p in model.parameters())
        values = InitByName(model, seed=3)
        engine: Any = build_engine(self._run, model, values, CrossEntropy(), device=torch.device("cpu"))
        self._engine = engine
        self.matrices = sum(model.get_parameter(name).numel() for name in engine._matrices) / self.parameters
        optimizer = engine._optimizer
        self.shares: list[float] = []
        if "muon" in kind:
            self.shares = optimizer._exchange.shares(range(len(optimizer._index)))
        if "alone" in kind:
            optimizer._exchange.__class__ = _EveryRankAlone
        self.steps, self.updates = _Times(), _Times()
        optimizer.step = partial(self.updates.measure, optimizer.step)

    def step(self, number: int) -> None:
        """Trains a step of random tokens."""
        batch = _batch(self._run, number, tokens=self._tokens)
        self.steps.measure(lambda: self._engine.train_step(batch, lr=1e-3))


class _EveryRankAlone(MatrixExchange):
    """All shards to all ranks, each of which computes all matrices."""

    def apply(self, tensors: dict[int, Tensor], compute: Callable[[list[tuple[MatrixForm, Tensor]]], None]) -> None:
        """See `MatrixExchange.apply`; of shards that are rows."""
        stored: list[tuple[MatrixForm, Tensor]] = []
        for index, own in tensors.items():
            sizes = [sum(shard.length for shard in held[index]) for held in self._held]
            gathered = [own.new_empty(max(sizes)) for _ in sizes]
            padded = torch.nn.functional.pad(own.view(-1), (0, max(sizes) - own.numel()))
            dist.all_gather(gathered, padded)
            form = next(shard.form for held in self._held for shard in held[index])
            whole = torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)]).view(form.shape)
            stored.append((form, whole))
        compute(stored)
        for (index, own), (_, whole) in zip(tensors.items(), stored, strict=True):
            for shard in self._held[self._rank][index]:
                own.view(-1).copy_(whole.view(-1)[shard.start : shard.start + shard.length])


def _resolved(kind: str, arguments: argparse.Namespace) -> ResolvedRun:
    config = {
        "engine": "torch",
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": arguments.hidden,
                "intermediate_size": 3 * arguments.hidden,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "vocab_size": VOCABULARY,
            }
        },
        "data": {"sources": [{"path": "none"}], "sequence_length": LENGTH},
        "train_batch_size": arguments.tokens // LENGTH,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW" if kind == "adamw" else "Muon", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "run": {"dir": "none", "steps": 100},
    }
    return resolve(parse(Config, config), world_size=arguments.ranks)


def _batch(run: ResolvedRun, step: int, *, tokens: int) -> StepBatch:
    generator = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
    rows = torch.randint(0, VOCABULARY, (run.batch.micro, LENGTH + 1), generator=generator)
    return StepBatch(step, [MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())], tokens)


if __name__ == "__main__":
    main()
