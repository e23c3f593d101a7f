"""Cases of `megatron_trainer`, and checkpoints that it has written, for tests where megatron-core is missing.

    python -m tests.checkpoint.importing.megatron_cases OUT llama mixtral     # with megatron-core 0.16.1, 0.13.1, ...

writes OUT/NAME.tar.xz: the folder that was saved, and losses.json, the losses of all steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from pipeline.plan.proof.tokens import write_tokens
from tests.checkpoint.importing.megatron_trainer import FOLDER
from tests.checkpoint.importing.source_trainers import SEQUENCE, VOCABULARY

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": SEQUENCE,
    "vocab_size": VOCABULARY,
    "activation_function": "gelu",
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}
SMALL = {"hidden_size": 16, "intermediate_size": 24}
STORED: dict[str, dict[str, Any]] = {
    "llama": {"tp": 2, "bf16": True, "sharding": "fully_reshardable", "model": SMALL},
    "mixtral": {
        "pp": 2,
        "sharding": "fully_sharded_model_space",
        "model": {**MIXTRAL, **SMALL, "hidden_size": 8, "num_local_experts": 3},
    },
    "gpt2": {"tp": 2, "hf": {**GPT2, "n_embd": 8}},
    "buckets": {"sharding": "dp_reshardable", "model": {**SMALL, "hidden_size": 8, "num_hidden_layers": 1}},
}
"""Of megatron-core 0.16.1, 0.13.1 (whose own default this `sharding` was), its source of 2026-08-22, and 0.16.1."""
LIVE: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tp 2": {"tp": 2, "sharding": "fully_reshardable"},
    "llama, pp 2": {"pp": 2, "sharding": "fully_reshardable"},
    "llama, pp 2, bf16": {"pp": 2, "bf16": True, "sharding": "fully_reshardable"},
    "llama, dp 2, bf16": {"bf16": True, "sharding": "fully_reshardable"},
    "llama, padded vocabulary": {"padded": 160, "model": {"vocab_size": 160}},
    "qwen2, tp 2": {"tp": 2, "model": {"model_type": "qwen2"}},
    "qwen3, pp 2": {"pp": 2, "model": {"model_type": "qwen3", "head_dim": 8}},
    "mixtral, dp 2": {"sharding": "fully_reshardable", "model": MIXTRAL},
    "mixtral, ep 2": {"ep": 2, "sharding": "fully_reshardable", "model": MIXTRAL},
    "mixtral, pp 2, bf16": {"pp": 2, "bf16": True, "model": MIXTRAL},
    "gpt2, tp 2": {"tp": 2, "hf": GPT2},
    "gpt2, dp 2": {"sharding": "fully_reshardable", "hf": GPT2},
}


def train(work: Path, cases: dict[str, dict[str, Any]], *, processes: int, saved: int, steps: int) -> dict[str, Any]:
    """Trains cases with megatron-core on the tokens in `work / tokens`; the losses of their steps."""
    common = {"tokens": str(work / "tokens"), "saved": saved, "steps": steps}
    full = {name: {**common, "folder": str(work / name), **case} for name, case in cases.items()}
    (work / "cases.json").write_text(json.dumps(full))
    worker = Path(__file__).with_name("megatron_trainer.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    words = [*launcher, str(worker), str(work / "cases.json"), str(work / "out.json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    losses: dict[str, Any] = json.loads((work / "out.json").read_text())
    return losses


def write_token_folder(work: Path) -> None:
    """The tokens that all cases are trained on."""
    write_tokens(work / "tokens", vocab_size=VOCABULARY, tokens=12_000, longest=2 * SEQUENCE)


def main() -> None:
    """Writes checkpoints to keep."""
    assert FOLDER in os.environ
    out = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_token_folder(work)
        found = train(work, {name: STORED[name] for name in sys.argv[2:]}, processes=2, saved=3, steps=6)
        for name, losses in found.items():
            (work / name / "losses.json").write_text(json.dumps(losses))
            with tarfile.open(out / f"{name}.tar.xz", "w:xz") as archive:
                archive.add(work / name, name)


if __name__ == "__main__":
    main()
