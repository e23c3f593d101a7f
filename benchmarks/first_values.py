"""Measures how long a rank takes to get its first values: computed, as zeros before a checkpoint, and from safetensors.

    python -m benchmarks.first_values [--layers 26] [--ranks 1 8 64] [--folder DIRECTORY]

A Llama of about 500M parameters in fp32. No process group is made: the first of so many ranks gets the rows of every
parameter that FSDP2 would give it, on one core. Printed are seconds by the clock and of the CPU, elements, and how much
the resident memory grew at its peak. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from benchmarks.init_memory import MIB, WIDTH, status
from pipeline.models.build.initial_values import InitByName, ParameterValues, Zeros
from pipeline.models.build.materialize import materialize
from pipeline.models.build.meta import build_meta, parameter_shapes
from pipeline.models.build.rectangle import Rectangle
from pipeline.models.build.stored_values import FromSafetensors


def main() -> int:
    """Prints one line per source of values and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--folder", type=Path, help="where the model is saved to be read; nothing is read without it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = CONFIG_MAPPING["llama"](**WIDTH, num_hidden_layers=arguments.layers, vocab_size=32000)
    model = build_meta(config, dtype=torch.float32, attn_implementation="sdpa")
    shapes = parameter_shapes(model)
    print(f"{sum(shape.numel() for shape in shapes.values()):,} parameters in fp32")
    sources: dict[str, ParameterValues] = {"computed": InitByName(model, seed=0), "zeros": Zeros(shapes)}
    if arguments.folder is not None:
        if not (arguments.folder / "model.safetensors").is_file():
            whole = build_meta(config, dtype=torch.float32, attn_implementation="sdpa")
            materialize(whole, Zeros(shapes), device=torch.device("cpu"))
            whole.save_pretrained(arguments.folder, max_shard_size="100GB")
        sources["safetensors"] = FromSafetensors(arguments.folder, model=model)
    for source, values in sources.items():
        for ranks in arguments.ranks:
            print(f"{source}, rank 0 of {ranks}: {measure(values, model, ranks)}")
    return 0


def measure(values: ParameterValues, model: nn.Module, ranks: int) -> str:
    """Gets the rows of rank 0 of every parameter; returns what it took."""
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak; see proc(5)
    began, cpu = time.perf_counter(), time.process_time()
    held: list[Tensor] = []
    for name, shape in parameter_shapes(model).items():
        rows = Rectangle.full(shape).rows(0, -(-shape[0] // ranks))
        held.append(values.value(name, box=rows if ranks > 1 else None) + 0)  # zeros take memory once they are touched
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return (
        f"{seconds:.2f} s, {cpu:.2f} s of the CPU, {sum(each.numel() for each in held):,} elements,"
        f" memory grew by {(status('VmHWM') - before) / MIB:,.0f} MiB at its peak"
    )


if __name__ == "__main__":
    sys.exit(main())
