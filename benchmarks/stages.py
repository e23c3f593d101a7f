"""WSM against WSD's decay, and a batch ramp against constant batches: held-out losses at equal tokens, on a CPU.

    python -m benchmarks.stages wsm [--steps 400] [--sizes 64x2,128x3,192x4] [--seed 1] [--data out/demo/tokens]
    python -m benchmarks.stages ramp [--steps 400] [--sizes 128x3] ...

The text is the demo's (`make demo`, or its first two commands). All models are llamas, WIDTHxLAYERS, on 16 samples of
128 tokens per step; a warm-up of 20 steps, then a constant rate. Losses are of the whole held-out split.

`wsm` trains each size once at the constant rate. At 80 % of the steps a branch begins that decays linearly to 0 over
the rest (WSD). The constant run's checkpoints of the same steps, 11 in all, are merged (WSM): both have read the same
tokens. `ramp` compares a batch that grows from 4 to 16 samples over half of the tokens with 16 and with 4 samples
throughout, with the same peak rate and, over the last fifth of the tokens, a linear decay to 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import Seconds, make_parser, print_head, print_row, work_folder

LENGTH, BATCH, SMALL = 128, 16, 4
"""Tokens per sample, samples per step, and samples per step before a ramp."""


def main() -> None:
    """Prints the table in Markdown."""
    parser = make_parser(__doc__)
    parser.add_argument("experiment", choices=("wsm", "ramp"))
    parser.add_argument("--steps", type=int, default=400, help="steps of 16 samples; a multiple of 50")
    parser.add_argument("--sizes", default="64x2,128x3,192x4", metavar="WIDTHxLAYERS,...")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", default="out/demo/tokens", help="a tokens directory")
    arguments = parser.parse_args()
    table = {"wsm": wsm, "ramp": ramp}[arguments.experiment]
    with work_folder() as work:
        for number, size in enumerate(arguments.sizes.split(",")):
            runs = _Runs(arguments, size, work / size)
            losses = table(runs, arguments.steps)
            if not number:
                print_head("width x layers", *losses, "seconds")
            print_row(size.replace("x", " x "), *(f"{loss:.4f}" for loss in losses.values()), f"{runs.seconds:.0f}")


def wsm(runs: _Runs, steps: int) -> dict[str, float]:
    """Returns the held-out losses of the constant rate, its merged checkpoints, and a decay."""
    begin = steps * 4 // 5
    apart = (steps - begin) // 10
    keep = {"checkpoint_every": apart, "keep_checkpoints": 11, "keep_every": begin}
    constant = runs.train("constant", run={"steps": steps, **keep})
    decay = {"type": "WSD", "params": {"warmup_num_steps": 0, "decay_num_steps": steps - begin}}
    # the branch goes on with the base's schedule up to its start, and has its own from there
    stages = [{"name": "stable", "until": {"steps": begin}}, {"name": "decay", "scheduler": decay}]
    wsd = runs.train("wsd", run={"steps": steps, "from": f"{constant}@{begin}"}, stages=stages)
    taken = ",".join(str(step) for step in range(begin, steps + 1, apart))
    found = {"constant rate": runs.loss(constant)}
    for shape in ("linear", "1-sqrt"):
        merged = runs.folder / f"merged-{shape}"
        _headrace("merge", constant, "--steps", taken, "--method", "wsm", "--shape", shape, merged)
        found[f"WSM, {shape}"] = runs.loss(merged)
    return {**found, "WSD, linear decay": runs.loss(wsd)}


def ramp(runs: _Runs, steps: int) -> dict[str, float]:
    """Returns the held-out losses of a batch ramp and of constant batches, each with its number of steps."""
    tokens = steps * BATCH * LENGTH
    whole = 12 * SMALL * LENGTH  # whole steps of 4, 8 and 12 samples, and three of them of 16
    grown = {"from": SMALL, "to": BATCH, "over_tokens": 3 * (tokens // 6 // whole * whole)}
    found = {}
    for name, batch in {"16 samples": BATCH, "4 to 16": grown, "4 samples": SMALL}.items():
        last = SMALL if batch == SMALL else BATCH
        decay = {"type": "WSD", "params": {"warmup_num_steps": 0, "decay_num_steps": tokens // 5 // (last * LENGTH)}}
        stages = [
            {"name": "stable", "until": {"tokens": tokens * 4 // 5}, "train_batch_size": batch},
            {"name": "decay", "scheduler": decay},
        ]
        run = runs.train(name.replace(" ", "-"), run={"tokens": tokens}, train_batch_size=last, stages=stages)
        done = json.loads((run / "manifest.json").read_text())["details"]["step"]
        found[f"{name}, {done} steps"] = runs.loss(run)
    return found


class _Runs:
    """Runs of one size.

    Args:
        arguments: The command line.
        size: Width and number of layers, e.g. 128x3.
        folder: Where the runs are written.
    """

    def __init__(self, arguments: argparse.Namespace, size: str, folder: Path) -> None:
        self._arguments, self.folder, self.seconds = arguments, folder, 0.0
        width, layers = map(int, size.split("x"))
        self._model = {
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": 8 * width // 3,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 32,
            "initializer_range": 0.05,
            "tie_word_embeddings": False,
        }
        folder.mkdir(parents=True)

    def train(self, name: str, *, run: dict[str, Any], **fields: Any) -> Path:
        """Trains a run; returns its directory."""
        config = {
            "engine": "torch",
            "model": {"config": self._model},
            "data": {"sources": [{"path": self._arguments.data}], "sequence_length": LENGTH},
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": SMALL,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": self._arguments.rate, "betas": [0.9, 0.95], "weight_decay": 0.1},
            },
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_type": "linear"}},
            "gradient_clipping": 1.0,
            "evaluation": {"samples": 0},
            "run": {"dir": str(self.folder / name), "seed": self._arguments.seed, **run},
            **fields,
        }
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(config))
        self.seconds += Seconds.of(lambda: _headrace("train", "--config", path)).wall
        return self.folder / name

    def loss(self, run: Path) -> float:
        """Returns the held-out loss of a run's newest checkpoint, in nats per token."""
        model = run.with_name(f"{run.name}-model")
        _headrace("export", run, model)
        options = ("--data", self._arguments.data, "--sequence-length", LENGTH, "--batch-size", 32, "--json")
        return float(json.loads(_headrace("eval", model, *options))["loss_nats"])


def _headrace(*words: object) -> str:
    command = [sys.executable, "-m", "headrace", *map(str, words)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
