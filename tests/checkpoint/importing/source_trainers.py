"""Trains with other trainers and lets them save: source_trainers.py CASES.json OUT.json, on as many ranks as it gets.

A case trains `saved` steps, saves, and goes on to `steps`; its result is the loss of every step, over all ranks. All
cases train the same model on the samples of a tokens directory in Headrace's order.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.sections.data import DataSection
from pipeline.data.mixture import open_mixture

SEQUENCE, VOCABULARY, BATCH, SEED, LR = 32, 128, 8, 3, 2e-3
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE,
    "tie_word_embeddings": False,
}
DECAY = 0.1
Losses = list[float]


def samples(case: dict[str, Any], step: int) -> Tensor:
    """This rank's samples of a step, from 1: int64 [n, T + 1]."""
    data = DataSection.model_validate({"sources": [{"path": case["tokens"]}], "sequence_length": SEQUENCE})
    whole = torch.from_numpy(open_mixture(data, seed=SEED).read(range((step - 1) * BATCH, step * BATCH)))
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def model_of(case: dict[str, Any]) -> nn.Module:
    """The same Hugging Face model on every rank, fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(11)
    fields = {**MODEL, **case.get("model", {})}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def loss_of(model: Any, rows: Tensor) -> Tensor:
    """Mean cross-entropy per target."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def mean(loss: Tensor) -> float:
    """Over all ranks, which have as many targets each."""
    value = loss.detach().double().reshape(1)
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def groups_of(model: nn.Module, *, split: bool) -> list[dict[str, Any]]:
    """One parameter group without weight decay, or one with it and one without, as most trainers have."""
    named = list(model.named_parameters())
    if not split:
        return [{"params": [p for _, p in named], "weight_decay": 0.0}]
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0},
    ]


def with_deepspeed(case: dict[str, Any]) -> Losses:
    """DeepSpeed's engine: ZeRO in `case["config"]`."""
    import deepspeed  # noqa: PLC0415

    model = model_of(case)
    config = {"train_batch_size": BATCH, "gradient_clipping": 1.0, **case["config"]}
    params = groups_of(model, split=case.get("split", True))
    optimizer = torch.optim.AdamW(params, lr=LR)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if "load" in case:
        engine.load_checkpoint(case["load"])
    losses = []
    for step in range(case.get("loaded", 0) + 1, case["steps"] + 1):
        loss = loss_of(engine, samples(case, step))
        losses.append(mean(loss))
        engine.backward(loss)
        engine.step()
        if step == case.get("saved"):
            engine.save_checkpoint(case["folder"])
            if case.get("universal") and dist.get_rank() == 0:
                to_universal(Path(case["folder"]))
    return losses


def to_universal(folder: Path) -> None:
    """Converts a checkpoint of ZeRO with DeepSpeed's own tool; what it was made of is removed."""
    from deepspeed.checkpoint import ds_to_universal  # noqa: PLC0415

    tag = folder / (folder / "latest").read_text()
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    made = tag.with_name(f"{tag.name}_universal")
    ds_to_universal.main(
        argparse.Namespace(input_folder=str(tag), output_folder=str(made), inject_missing_state=True, **options)
    )
    shutil.rmtree(tag)
    (folder / "latest").unlink()


KINDS = {"deepspeed": with_deepspeed}


def main() -> None:
    """Trains all cases."""
    if not dist.is_initialized():
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29533"}.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        dist.init_process_group("gloo")
    cases: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    losses = {name: KINDS[case["kind"]](case) for name, case in cases.items()}
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
