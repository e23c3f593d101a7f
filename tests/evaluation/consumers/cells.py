"""Architecture x scheme x tokenizer: each cell is trained, compressed and scored by the programs that serve it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from foundation.directory import read_manifest
from pipeline.data.dataset import TokenDataset
from tests import warm
from tests.compress.quantization.test_quantize import ENTRY
from tests.conftest import make_tokens, text_folders
from tests.models.architectures import config_of
from tests.sweeps.run_families import failure

VOCABULARY, LENGTH, STEPS = 512, 64, 120
_SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
_COMMON: dict[str, Any] = {**_SHAPE, "num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 128}
_GPT2 = {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}
_EXPERTS = {"moe_intermediate_size": 64, "norm_topk_prob": True}

_LATENT = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "rope_interleave": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "tie_word_embeddings": True},
    "qwen3": _COMMON,
    "mistral": {**_COMMON, "sliding_window": None},
    "gemma": _COMMON,
    "gpt2": _GPT2,
    "mixtral": _COMMON,
    "qwen3_moe": {**_COMMON, **_EXPERTS},
    "deepseek_v3": _LATENT,
}
"""Name in `tests.models.architectures` -> fields: two heads of 32 features, which every consumer takes."""

SCHEMES = ("bf16", "W4A16", "W8A8", "FP8", "Q8_0", "Q4_K_M")
TOKENIZERS = ("bpe", "sentencepiece-bpe")
"""Kinds that data prep trains."""


def groups() -> dict[str, list[str]]:
    return {name: [f"{name}, {s}, {t}" for t in TOKENIZERS for s in SCHEMES] for name in ARCHITECTURES}


def run_cell(cell: str, work: Path) -> tuple[bool, str]:
    """Whether all that take the scheme accept a cell's result, or it was refused first; and figures, or why not."""
    name, scheme, kind = cell.split(", ")
    tokens = work / kind / "tokens"
    if not tokens.exists():
        tokens.parent.mkdir(parents=True)
        make_tokens(tokens.parent, text_folders(), tokenizer={"train": kind, "vocab_size": VOCABULARY})
    model = tokens.parent / name
    if not model.exists():
        train(model, name, tokens)
    if scheme == "bf16":
        return _verify(model, tokens)
    config = tokens.parent / f"{name}-{scheme}.json"
    output = tokens.parent / f"{name}-{scheme}"
    data = {"path": str(tokens), "sequence_length": LENGTH, "max_tokens": 20_000}
    fields = {"model": str(model), "output": str(output), "scheme": scheme, "data": data}
    config.write_text(json.dumps(fields))
    done = warm.run(ENTRY, "--config", config)
    if done.returncode:
        why = failure("quantize", done.returncode, done.stderr)
        return why.startswith("refused") and "evaluating" not in done.stderr, why
    figures = shown(read_manifest(output, kind="model").details["consumers"])
    if not figures:
        assert "warning: no program that serves the result" in done.stderr
    return True, figures or "written with a warning: no consumer takes it"


def _verify(model: Path, tokens: Path) -> tuple[bool, str]:
    """The unquantized folder against itself: what the arithmetic of each consumer costs."""
    options = ("--original", model, "--data", tokens, "--sequence-length", LENGTH, "--json")
    done = warm.run("-m", "pipeline", "compress", "verify", model, *options)
    if done.returncode:
        return False, failure("verify", done.returncode, done.stderr)
    return True, shown(json.loads(done.stdout.splitlines()[-1])["consumers"])


def shown(consumers: dict[str, dict[str, Any]]) -> str:
    return "; ".join(
        f"{name} {each['mean_kl']:.1e} ({each['top1_agreement']:.1%})"
        for name, each in consumers.items()
        if "not_run" not in each
    )


def train(folder: Path, name: str, tokens: Path) -> None:
    """Trains a model of two layers for some seconds and saves it in bf16."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name, vocab_size=VOCABULARY, **ARCHITECTURES[name]))
    dataset = TokenDataset.open(tokens, split="train", sequence_length=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        rows = torch.from_numpy(dataset.read((np.arange(16) + 16 * step) % dataset.windows)).long()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tokens / "tokenizer").save_pretrained(folder)
    for file in (tokens / "tokenizer").glob("*.model"):
        (folder / file.name).write_bytes(file.read_bytes())
