"""GPTQ against llm-compressor's: KL to the original, time and memory; W4A16 in groups of 32, the same windows for both.

    python -m benchmarks.gptq MODEL TOKENS --peer PYTHON [--samples 128] [--sequence-length 128]
    python -m benchmarks.gptq MODEL TOKENS --peer PYTHON --layers 16 --hidden 768 --samples 24 --positions 0

PYTHON is the interpreter of an environment with llmcompressor, which pins its own transformers. Ours runs twice: one
decoder layer at a time from the files, as the command does, and with the whole model in memory. transformers scores
every result, and rounding to nearest, on held-out windows in separate processes. Time lasts from reading the model to
the written folder, without evaluations, as wall and CPU time with --threads threads; with --rounds the least of several
alternating runs. Memory is the peak resident size of a process, and its excess over the size after the imports.

With --layers a model of that size with random weights is quantized instead, with MODEL's tokenizer, for time and
memory. --positions 0 leaves out the scores, which mean nothing for random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import alternate, last_json, make_parser, print_head, print_row, work_folder
from pipeline.data.dataset import TokenDataset, choose_windows

PEER_NAME = "llm-compressor"
OURS_NAMES = ("rtn", "gptq", "gptq, whole model")
MEASURED = """
import json, time
def peak():  # not ru_maxrss, which a process takes over from the one that started it
    return next(int(line.split()[1]) / 1e3 for line in open("/proc/self/status") if line.startswith("VmHWM"))
imports = peak()
began, busy = time.perf_counter(), time.process_time()
quantize()
print(json.dumps([time.perf_counter() - began, time.process_time() - busy, peak(), imports]))
"""
PEER = """
import sys
import numpy as np, torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer
source, rows, out = sys.argv[1:]
rows = np.load(rows)
data = Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": np.ones_like(rows).tolist()})
weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
def quantize():
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    oneshot(model=model, dataset=data, recipe=GPTQModifier(ignore=["lm_head"], config_groups=groups),
            num_calibration_samples=len(rows), max_seq_length=rows.shape[1], shuffle_calibration_samples=False,
            tokenizer=AutoTokenizer.from_pretrained(source))
    model.save_pretrained(out, save_compressed=True)
"""

OURS = """
import json, sys
from pathlib import Path
from rich.console import Console
from foundation.section import parse
from pipeline.compress import run
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.quantization.rules import prepare
way, config = sys.argv[1:]
plan = prepare(parse(QuantizeConfig, json.loads(config)))
run.measure = lambda *_: {}  # evaluations are left out
if way == "whole":
    run.streamable = lambda *_: False
plan.output.mkdir()
def quantize():
    run._write_folder(plan, plan.output, Console(stderr=True))
"""


class Cost(NamedTuple):
    """Costs of one run: wall and CPU seconds, peak megabytes, and megabytes after the imports."""

    seconds: float
    cpu_seconds: float
    peak_mb: float
    imports_mb: float


def main() -> None:
    """Entry point."""
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("tokens", type=Path, help="tokens directory")
    parser.add_argument("--peer", required=True, help="Python with llmcompressor")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--positions", type=int, default=16_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--layers", type=int, help="of a random model that is quantized instead")
    parser.add_argument("--hidden", type=int, default=768, help="hidden size of the random model")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    with work_folder() as work:
        if asked.layers:
            asked.model = random_model(asked, work / "random")
        ways = {name: partial(ours, asked, work, name) for name in OURS_NAMES} | {PEER_NAME: partial(peer, asked, work)}
        costs = alternate(ways, asked.rounds, warmup=0)
        print_table(asked, work, {name: Cost(*map(min, zip(*found, strict=True))) for name, found in costs.items()})


def print_table(asked: argparse.Namespace, work: Path, costs: dict[str, Cost]) -> None:
    """Prints a row for each method, with its cost against llm-compressor's."""
    times = ("seconds", "CPU seconds", "peak MB", "above imports, MB", "CPU s, of the peer's")
    print_head("method", "mean KL", "max KL", "top-1", *times)
    for name, cost in costs.items():
        figures = ["-", "-", "-"]
        if asked.positions:
            found = score(asked, folder_of(work, name))
            figures = [f"{found['mean_kl']:.6f}", f"{found['max_kl']:.4f}", f"{found['top1_agreement']:.2%}"]
        above, ratio = cost.peak_mb - cost.imports_mb, cost.cpu_seconds / costs[PEER_NAME].cpu_seconds
        times = [f"{cost.seconds:.1f}", f"{cost.cpu_seconds:.1f}", f"{cost.peak_mb:.0f}", f"{above:.0f}"]
        print_row(name, *figures, *times, f"{ratio:.2f}")


def random_model(asked: argparse.Namespace, folder: Path) -> Path:
    """Makes a Llama with random weights, and the tokenizer of `asked.model`."""
    import torch  # noqa: PLC0415  seconds of import, in a process whose memory is not measured
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    config = AutoConfig.from_pretrained(asked.model)
    config.num_hidden_layers, config.hidden_size = asked.layers, asked.hidden
    config.intermediate_size, config.head_dim = asked.hidden * 8 // 3 // 64 * 64, 64
    config.num_attention_heads = config.num_key_value_heads = asked.hidden // 64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    model.save_pretrained(folder)
    for file in asked.model.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def folder_of(work: Path, name: str) -> Path:
    """The folder for a method's result."""
    return work / name.replace(", ", "-").replace(" ", "-")


def ours(asked: argparse.Namespace, work: Path, name: str) -> Cost:
    """Runs our quantization, as `headrace quantize` does."""
    out = folder_of(work, name)
    for path in (out, out.with_name(f".{out.name}.work")):  # left from the round before
        shutil.rmtree(path, ignore_errors=True)
    method, _, whole = name.partition(", ")
    data = {"path": str(asked.tokens), "sequence_length": asked.sequence_length}
    config = {"model": str(asked.model), "output": str(out), "scheme": "W4A16", "method": method, "data": data}
    config |= {"calibration": {"samples": asked.samples}, "consumers": ["transformers"], "dtype": "float32"}
    way = "whole" if whole else "streamed"
    # `out` is made after the check that it does not exist
    return Cost(*last_json([sys.executable, "-c", OURS + MEASURED, way, json.dumps(config)]))


def peer(asked: argparse.Namespace, work: Path) -> Cost:
    """Runs llm-compressor's quantization."""
    dataset = TokenDataset.open(asked.tokens, split="train", sequence_length=asked.sequence_length)
    np.save(work / "rows.npy", dataset.read(choose_windows(dataset.windows, asked.samples))[:, :-1])
    out = folder_of(work, PEER_NAME)
    shutil.rmtree(out, ignore_errors=True)
    found = Cost(*last_json([asked.peer, "-c", PEER + MEASURED, asked.model, work / "rows.npy", out]))
    for file in asked.model.glob("tokenizer*"):
        shutil.copy(file, out)
    return found


def score(asked: argparse.Namespace, folder: Path) -> Any:
    """Scores a folder by transformers."""
    command = [sys.executable, "-m", "pipeline", "compress", "verify", folder, "--original", asked.model]
    command += ["--data", asked.tokens, "--sequence-length", asked.sequence_length, "--positions", asked.positions]
    return last_json([*command, "--consumers", "transformers", "--json"])["consumers"]["transformers"]


if __name__ == "__main__":
    main()
