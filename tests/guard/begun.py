"""A run that an earlier commit began: `begun.tar.xz`, made by `python -m tests.guard --make-fixture COMMIT`.

It holds a config, its tokens, the run's directory after half of its steps, and `facts.json`: the losses of the other
half by the commit that began it, and where they were computed.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.conftest import ROOT, losses

ARCHIVE = Path(__file__).with_name("begun.tar.xz")
HALF, STEPS = 4, 8
_WEIGHTS = [{"after_step": 0, "weights": {"a": 3, "b": 1}}, {"after_step": 3, "weights": {"a": 1, "b": 1}}]
CONFIG: dict[str, Any] = {
    "engine": "torch",
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        }
    },
    "data": {
        "sources": [{"path": "a"}, {"path": "b"}],
        "curriculum": _WEIGHTS,
        "sequence_length": 32,
        "mask_documents": True,
    },
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 10}},
    "gradient_clipping": 1.0,
    "loss": {"z_loss": 1e-4},
    "run": {"dir": "run", "steps": STEPS, "seed": 7, "checkpoint_every": HALF},
    "evaluation": {"every": 2, "samples": 8},
}
# tokens are written by the commit that begins the run: its format is a part of what is guarded
TOKENS = """
from pathlib import Path
from pipeline.plan.proof.tokens import write_tokens
for name, longest in (("a", 64), ("b", 24)):
    write_tokens(Path(name), vocab_size=64, tokens=2_000, longest=longest)
"""


def make(commit: str) -> None:
    """Begins a run with the code of a commit, and replaces the archive by it."""
    with tempfile.TemporaryDirectory() as folder:
        code, half, whole = (Path(folder, name) for name in ("code", "half", "whole"))
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(code), commit], check=True)
        try:
            for made, steps in ((half, HALF), (whole, STEPS)):
                _run(code, made, steps=steps)
        finally:
            subprocess.run([*git, "remove", "--force", str(code)], check=True)
        # the first half is that of a run that was stopped there, and the other that of one that was not
        facts = {"commit": commit, **machine(), "losses": losses(whole / "run")}
        (half / "facts.json").write_text(json.dumps(facts, indent=1))
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            archive.add(half, arcname="begun")


def _run(code: Path, made: Path, *, steps: int) -> None:
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    env = {**os.environ, "PYTHONPATH": str(code)}
    train = [str(code / "pipeline/train.py"), "--config", "config.json", "--nproc", "2", "--set", f"run.steps={steps}"]
    for words in (["-c", TOKENS], train):
        subprocess.run([sys.executable, *words], cwd=made, env=env, check=True)


def machine() -> dict[str, str]:
    """What rounding depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {"processor": model or platform.machine(), "torch": torch.__version__}
