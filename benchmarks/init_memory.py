"""Measures peak host memory of sharded parameter initialization: law 2 allows a rank's shards plus one parameter.

    python -m benchmarks.init_memory [--engine torch|deepspeed] [--ranks 4] [--layers 24]

A Llama of about 470M parameters in fp32 is built on meta and materialized on several processes of this machine, sharded
with FSDP2 or ZeRO-3. Printed per rank: the growth of resident memory at the end, and at its peak, beside the size of
the full model. Linux only: the peak is read from /proc and reset before the model is built.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING

from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config
from pipeline.engines.build import build_engine
from pipeline.engines.objective import CrossEntropy
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.build.initial_values import InitByName
from pipeline.models.build.meta import build_meta

MIB = 2**20
WIDTH = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}


def main() -> int:
    """Starts the ranks, or runs as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("torch", "deepspeed"), default="torch")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.ranks}"]
        # glibc does not return freed tensors below 32 MiB between the shards that stay: 600 MiB more than 450
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
        return subprocess.run(
            [*command, "-m", "benchmarks.init_memory", *sys.argv[1:]], env=environment, check=False
        ).returncode
    dist.init_process_group("gloo")
    measure(arguments.engine, arguments.layers)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as the entry points do: torch 2.13 may abort while gloo is torn down


def measure(engine: str, layers: int) -> None:
    """Builds the engine and prints memory and time per rank."""
    fields = {**WIDTH, "num_hidden_layers": layers, "vocab_size": 32000}
    model = build_meta(CONFIG_MAPPING["llama"](**fields), dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    config: dict[str, Any] = {
        "engine": engine,
        "model": {"config": {"model_type": "llama", **fields}},
        "data": {"sources": [{"path": "none"}], "sequence_length": 128},
        "run": {"dir": "none", "steps": 1},
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
    }
    run = resolve(Config.model_validate(config), world_size=dist.get_world_size())
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak; see proc(5)
    began = time.perf_counter()
    built = build_engine(run, model, InitByName(model, seed=0), CrossEntropy(), device=torch.device("cpu"))
    line = (
        f"rank {dist.get_rank()}: memory grew by {(status('VmRSS') - before) / MIB:,.0f} MiB,"
        f" at its peak by {(status('VmHWM') - before) / MIB:,.0f}, in {time.perf_counter() - began:.0f} s"
    )
    lines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    if built.rank == 0:
        sizes = [4 * parameter.numel() for parameter in model.parameters()]
        share = sum(sizes) / dist.get_world_size()
        print(
            f"{engine}: {sum(sizes) // 4:,} parameters in fp32: full model {sum(sizes) / MIB:,.0f} MiB,"
            f" shards of a rank {share / MIB:,.0f} MiB, largest parameter {max(sizes) / MIB:,.0f} MiB"
        )
        print("\n".join(lines))


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    sys.exit(main())
