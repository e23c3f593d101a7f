"""Learning curves of Muon and AdamW at equal tokens, each at the best of the same learning rates, over three seeds.

    python -m benchmarks.muon_learning --tokens out/demo/tokens [--steps 240] [--rates 2e-3 4e-3 8e-3 1.6e-2 3.2e-2]

A smaller teacher of the demo in one process, on tokens that the demo has made. Rates are tried with the first seed, by
the held-out loss at the end; the other seeds run at the best. A seed decides first weights and samples. Behind +- is
half the range over the seeds: three allow no more.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.base.section import parse
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.schedule import Schedule
from pipeline.config.sections.run import Config
from pipeline.data.loader import MicroBatch, StepBatch
from pipeline.engines.build import build_engine
from pipeline.engines.common import model_dtype
from pipeline.engines.objective import CrossEntropy
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.build.initial_values import InitByName
from pipeline.models.build.meta import build_meta
from pipeline.models.hf_config import resolve_hf_config

LENGTH, SAMPLES, VOCABULARY = 128, 8, 2048
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.1}},
    "Muon": {"type": "Muon", "params": {"weight_decay": 0.1}},
}

Curve = dict[int, float]
"""Step -> held-out loss in nats per token."""


def main() -> None:
    """Runs the benchmark and prints its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="a tokens directory with a vocabulary of 2,048")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.optimizers:
        tried = {rate: _curve(name, rate, arguments.seeds[0], arguments) for rate in arguments.rates}
        for rate, curve in tried.items():
            print(f"{name} lr {rate:g} seed {arguments.seeds[0]}: {_text(curve)}", flush=True)
        best = min(tried, key=lambda rate: tried[rate][arguments.steps])
        curves = [tried[best], *(_curve(name, best, seed, arguments) for seed in arguments.seeds[1:])]
        for step in curves[0]:
            values = [curve[step] for curve in curves]
            half = (max(values) - min(values)) / 2
            print(f"{name} lr {best:g} step {step}: {sum(values) / len(values):.4f} +- {half:.4f}", flush=True)


def _curve(name: str, rate: float, seed: int, arguments: argparse.Namespace) -> Curve:
    run = _resolved(name, rate, arguments)
    hf = resolve_hf_config(run.config.model, tokenizer={"vocab_size": VOCABULARY}, sequence_length=LENGTH)
    model = build_meta(hf, dtype=model_dtype(run.config), attn_implementation=ATTENTION_NAME)
    engine = build_engine(run, model, InitByName(model, seed=seed), CrossEntropy(), device=torch.device("cpu"))
    schedule = Schedule("WarmupCosineLR", rate, warmup=arguments.steps // 10, total=arguments.steps, end_ratio=0.01)
    heldout = list(_batches(arguments.tokens / "heldout", seed=0, count=16))
    found: Curve = {}
    for number, micro in enumerate(_batches(arguments.tokens / "train", seed=seed, count=arguments.steps), start=1):
        engine.train_step(StepBatch(number, [micro], micro.labels.numel()), lr=schedule.lr(number))
        if number % (arguments.steps // 4) == 0:
            sums = engine.evaluate(heldout)
            found[number] = sums.nats / sums.targets
    return found


def _batches(folder: Path, *, seed: int, count: int) -> Iterator[MicroBatch]:
    """Samples of consecutive tokens from random places."""
    tokens = np.memmap(folder / "shard-00000.bin", dtype=np.uint16, mode="r")
    generator = np.random.default_rng(seed)
    for _ in range(count):
        starts = generator.integers(0, len(tokens) - LENGTH - 1, size=SAMPLES)
        rows = torch.from_numpy(np.stack([tokens[start : start + LENGTH + 1] for start in starts]).astype(np.int64))
        yield MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def _resolved(name: str, rate: float, arguments: argparse.Namespace) -> ResolvedRun:
    optimizer = OPTIMIZERS[name]
    config = {
        "engine": "torch",
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": arguments.hidden,
                "intermediate_size": 3 * arguments.hidden,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "initializer_range": 0.05,
                "tie_word_embeddings": False,
                "vocab_size": VOCABULARY,
            }
        },
        "data": {"sources": [{"path": str(arguments.tokens)}], "sequence_length": LENGTH},
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {**optimizer, "params": {**optimizer["params"], "lr": rate}},
        "gradient_clipping": 1.0,
        "run": {"dir": "none", "steps": arguments.steps},
    }
    return resolve(parse(Config, config), world_size=1)


def _text(curve: Curve) -> str:
    return ", ".join(f"{loss:.4f} at {step}" for step, loss in curve.items())


if __name__ == "__main__":
    main()
