"""Loss of Muon and AdamW over equal tokens, each at the learning rate of `headrace ladder`'s sweep, over three seeds.

    python -m benchmarks.muon_learning --tokens out/demo/tokens [--output out/muon_learning]

Every optimizer has a ladder, whose smallest rung is a smaller teacher of the demo. Its sweep chooses the learning rate
at the last of `BUDGETS`; then the rung is trained with every budget, each with a whole schedule, by every seed. Batch
and rate of the shorter runs follow from the large run's by the ladder's exponents (Step Law), for all optimizers alike.
`muon_lr` and `adam_lr` keep their proportion in a sweep, so each proportion is an entry of `OPTIMIZERS`. A seed decides
first weights and samples. Runs are ordinary ones: started again, the benchmark trains those that are not finished.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.plan.ladder.large_run import read_large_run
from pipeline.plan.ladder.learning_rate import sweep
from pipeline.plan.ladder.plan import Ladder, Options, plan_ladder
from pipeline.plan.ladder.runs import done_of, train_all

RATE = 4e-3
"""In the middle of the sweep, for the large run; the sweep is extended where the best is at its end."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "Muon": {"type": "Muon", "params": {"lr": RATE, "weight_decay": 0.1}},
    "Muon-4": {"type": "Muon", "params": {"lr": RATE, "muon_lr": 4 * RATE, "adam_lr": RATE, "weight_decay": 0.1}},
}
BUDGETS = (0.25, 0.5, 1.0)
"""Tokens, as multiples of the large run's tokens per parameter: the rung's 240 steps of 8 samples are 1."""
HIDDEN = 128
"""Of the rung; the large run's is twice that, and is never trained."""
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Seeds -> 97.5 % quantile of Student's t distribution: of a 95 % interval of their mean."""


def main() -> int:
    """Runs the benchmark and prints its results; the exit code of a run that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="a tokens directory")
    parser.add_argument("--output", type=Path, default=Path("out/muon_learning"), help="directory of the ladders")
    parser.add_argument("--seeds", type=int, default=3, choices=list(STUDENT_T))
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    arguments = parser.parse_args()
    for name in arguments.optimizers:
        options = Options(rungs=3, smallest=0.29, largest=0.6, budgets=BUDGETS, seeds=arguments.seeds)
        ladder = plan_ladder(read_large_run(_config(name, arguments.tokens)), options, arguments.output / name)
        code = _tuned(name, ladder)
        if code:
            return code
    return 0


def _tuned(name: str, ladder: Ladder) -> int:
    """Sweeps, trains and prints; an exit code."""
    train = partial(train_all, ladder, jobs=1, nproc=1, say=partial(print, flush=True))
    chosen, code = sweep(ladder, train)
    if chosen is None:
        return code
    rung = ladder.rungs[0]
    assert rung.model.hidden_size == HIDDEN
    runs = [run for run in ladder.runs(chosen.factor) if run.rung == rung]
    code = train(runs)
    if code:
        return code
    swept = ", ".join(f"{loss:.4f} at {factor:g}" for factor, loss in chosen.points)
    print(f"{name}, sweep: {swept} times {ladder.sweep(range(1))[0].learning_rate:g}")
    for tokens in sorted({run.tokens for run in runs}):
        done = [each for each in done_of(ladder, runs) if each.run.tokens == tokens]
        losses = [each.loss for each in done]
        half = STUDENT_T[len(losses)] * statistics.stdev(losses) / math.sqrt(len(losses))
        rate, seeds = done[0].run.learning_rate, " ".join(f"{loss:.4f}" for loss in losses)
        print(
            f"{name}, {tokens:,} tokens, lr {rate:g}: {statistics.mean(losses):.4f} +- {half:.4f} ({seeds})", flush=True
        )
    return 0


def _config(name: str, tokens: Path) -> dict[str, Any]:
    """Of the run that the rung is a smaller one of."""
    steps = 410
    return {
        "engine": "torch",
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 2 * HIDDEN,
                "intermediate_size": 6 * HIDDEN,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "initializer_range": 0.05 / math.sqrt(2),
                "tie_word_embeddings": False,
            }
        },
        "data": {"sources": [{"path": str(tokens)}], "sequence_length": 128},
        "train_batch_size": 16,
        "optimizer": OPTIMIZERS[name],
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": steps // 10, "warmup_type": "linear", "cos_min_ratio": 0.01},
        },
        "gradient_clipping": 1.0,
        "run": {"dir": "none", "steps": steps, "seed": 1},
        "evaluation": {"samples": 128},
    }


if __name__ == "__main__":
    sys.exit(main())
