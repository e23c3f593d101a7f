"""A tokens directory and a model, small enough to be made in seconds and real in every part."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data_prep.formats.maskfile import mask_path
from data_prep.formats.tokenfile import TokenFile, TokenFileWriter, dtype_for, shard_name, shard_prefix
from data_prep.tokenizer.fingerprint import tokenizer_fingerprint
from foundation.directory import MANIFEST, commit, read_manifest, staging_path
from pipeline.data.dataset import TokenDataset
from tests.warm_python import python

VOCAB = 384  # the 256 bytes, the end-of-text token and a hundred merges
END = "<|endoftext|>"
SEQUENCE = 32
TEXTS = [
    f"The mill at race {n} turns {n * n} times while {n % 7} wheels of {n % 11} spokes wait.\n" * 3 for n in range(160)
]
_SPLITS = {"train": TEXTS[:120], "heldout": TEXTS[120:]}


def make_tokenizer(folder: Path, texts: list[str] = TEXTS) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.save_pretrained(folder)
    return fast


def make_tokens(final: Path, texts: list[str] = TEXTS, *, parts: dict[str, list[str]] | None = None) -> Path:
    """Writes a tokens directory as `data_prep` does: a tokenizer, two splits of two shards each, a manifest."""
    staging = staging_path(final)
    staging.mkdir(parents=True)
    tokenizer = make_tokenizer(staging / "tokenizer", texts)
    splits = {split: _write_split(staging, split, part, tokenizer) for split, part in (parts or _SPLITS).items()}
    fingerprint = tokenizer_fingerprint(staging / "tokenizer")
    about = {"fingerprint": fingerprint, "vocab_size": len(tokenizer), "eos_id": tokenizer.eos_token_id}
    commit(staging, final, kind="tokens", config={}, details={"tokenizer": about, "splits": splits})
    return final


def make_masked(final: Path, tokens: Path, loss_mask: Callable[[np.ndarray, str], np.ndarray]) -> Path:
    """Copies a tokens directory with loss masks: `loss_mask` takes a shard's ids and the name of its split."""
    manifest, staging = read_manifest(tokens, kind="tokens"), staging_path(final)
    shutil.copytree(tokens, staging, ignore=shutil.ignore_patterns(MANIFEST))
    for split in manifest.details["splits"]:
        for prefix in (path.with_suffix("") for path in (staging / split).glob("*.bin")):
            ids = np.asarray(TokenFile.open(prefix).tokens)
            mask_path(prefix).write_bytes(loss_mask(ids, split).astype(np.uint8).tobytes())
    commit(staging, final, kind="tokens", config={}, details=manifest.details)
    return final


def every_third(ids: np.ndarray, _split: str) -> np.ndarray:
    return np.arange(ids.size) % 3 == 0


def make_model(folder: Path, tokens: Path, *, tied: bool = True, steps: int = 60, heads: int = 4) -> Path:
    """Trains a two-layer Llama for a second or two and saves it in float32 beside the dataset's tokenizer."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB}
    attention = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "max_position_embeddings": 128}
    model = LlamaForCausalLM(LlamaConfig(**shape, **attention, tie_word_embeddings=tied))
    dataset = TokenDataset.open(tokens, split="train", sequence_length=SEQUENCE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows = torch.from_numpy(dataset.read((np.arange(8) + 8 * step) % dataset.windows))
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tokens / "tokenizer").save_pretrained(folder)
    return folder


def run_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [python(), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)


def _write_split(root: Path, split: str, texts: list[str], tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    (root / split).mkdir()
    shards = [_write_shard(root, split, i, texts[i::2], tokenizer) for i in range(2)]
    totals = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
    return {**totals, "shards": shards}


def _write_shard(
    root: Path, split: str, i: int, texts: list[str], tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    with TokenFileWriter(shard_prefix(root, split, i), dtype=dtype_for(VOCAB)) as writer:
        for document in ids:
            writer.append(np.asarray(document, dtype=dtype_for(VOCAB)))
    size = sum(len(text.encode()) for text in texts)
    return {"name": shard_name(i), "documents": len(ids), "tokens": sum(map(len, ids)), "bytes": size}
