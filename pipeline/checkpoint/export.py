"""From a checkpoint to a Hugging Face folder, tensor by tensor, with a gate that refuses a wrong model.

Weights are read from the named shards one tensor at a time and written to safetensors files of bounded size, so that
a model of any size is exported in the memory of one file. Then the folder is loaded as any user would load it, and its
logits are compared with those of a model filled from the checkpoint by the training code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from data_prep.tokenizer.fingerprint import tokenizer_fingerprint
from headrace.base.directory import Manifest, commit, fresh_staging, read_manifest
from headrace.base.errors import CheckpointError, DataError
from pipeline.checkpoint.read_weights import FromCheckpoint
from pipeline.checkpoint.store import Checkpoint, damage_of
from pipeline.checkpoint.trained_model import attention_of, trained_config, trained_model
from pipeline.config.renamed_keys import upgrade_keys
from pipeline.data.permutation import permute
from pipeline.models.materialise import materialise
from pipeline.models.meta import parameter_shapes
from pipeline.models.tokenizer_files import check_tokenizer_folder, copy_tokenizer

SHARD_BYTES = 4 << 30
"""Largest safetensors file: fits file systems and tools that stop at 4 GiB of tensors."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference of logits between two readings of the same weights: only the order of additions may differ."""


def export(
    checkpoint: Checkpoint,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    replace: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Manifest:
    """Writes a checkpoint's model as a Hugging Face folder.

    Args:
        checkpoint: what to export.
        out: the folder; whole or absent.
        dtype: of the written weights; as trained when None.
        tokenizer: a tokenizer folder; that of the run's first dataset when None.
        replace: an existing folder is replaced.
        progress: called with (tensors written, tensors in all).

    Raises:
        CheckpointError: the checkpoint is damaged, or the exported model's logits are not the trained one's.
        DataError: the folder exists, or the tokenizer is not found.
    """
    manifest = checkpoint.manifest
    damage = damage_of(checkpoint)
    if damage:
        raise CheckpointError(f"{checkpoint.path} is damaged: {damage}\n  try: an older checkpoint of the run")
    if "hf_config" not in manifest.details:
        why = "it is of a loop of somebody's own, and does not say what model it holds"
        raise CheckpointError(f"{checkpoint.path} cannot be exported: {why}\n  try: a checkpoint of pipeline/train.py")
    if out.exists() and not replace:
        raise DataError(f"{out} exists already\n  try: another folder, or --replace")
    tokenizer = tokenizer or _tokenizer_of(manifest)
    _check_tokenizer(tokenizer, manifest)
    config = trained_config(manifest)
    trained = torch.bfloat16 if manifest.config["bf16"]["enabled"] else torch.float32
    dtype = dtype or trained
    values = FromCheckpoint(checkpoint.path)
    model = trained_model(manifest, dtype=dtype)
    _compare_names(values.shapes, parameter_shapes(model), checkpoint)
    with _staged(out) as staging:
        _write_weights(values, staging, dtype, progress)
        _write_config(config, model, staging, dtype)
        copy_tokenizer(tokenizer, staging)
        details = {
            "step": checkpoint.step,
            "dtype": str(dtype).removeprefix("torch."),
            "parameters": sum(shape.numel() for shape in values.shapes.values()),
            "largest_logit_difference": _gate(model, values, staging, dtype, attention_of(manifest)),
        }
        parents = {"checkpoint": {"path": str(checkpoint.path), "fingerprint": manifest.fingerprint}}
        told: dict[str, Any] = {"config": upgrade_keys(manifest.config), "parents": parents, "details": details}
        return commit(staging, out, kind="model", **told, replace=replace)


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """A directory to build `out` in; deleted when that fails, since an export starts from the beginning anyway."""
    staging = fresh_staging(out)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # by then it has another name, if all went well


def _tokenizer_of(manifest: Manifest) -> Path:
    parent = manifest.parents["data.sources.0"]
    tokens = Path(parent["path"])
    try:
        found = read_manifest(tokens, kind="tokens").fingerprint
    except DataError as error:
        message = f"the run's tokenizer is not where it was: {error}\n  try: --tokenizer FOLDER"
        raise DataError(message) from None
    if found != parent["fingerprint"]:
        raise DataError(f"{tokens} is no longer the dataset of this run\n  try: --tokenizer FOLDER")
    return tokens / "tokenizer"


def _check_tokenizer(folder: Path, manifest: Manifest) -> None:
    check_tokenizer_folder(folder)
    trained_on = manifest.details["tokenizer"]["fingerprint"]
    if (folder / "tokenizer.json").is_file() and tokenizer_fingerprint(folder) != trained_on:
        raise DataError(f"{folder} is not the tokenizer the model was trained with: ids would mean other text")


def _compare_names(found: dict[str, torch.Size], needed: dict[str, torch.Size], checkpoint: Checkpoint) -> None:
    if found != needed:
        odd = sorted(set(found.items()) ^ set(needed.items()))[:4]
        names = ", ".join(f"{name} {tuple(shape)}" for name, shape in odd)
        raise CheckpointError(f"{checkpoint.path} does not hold the model its manifest describes: {names}")


def _write_weights(
    values: FromCheckpoint, folder: Path, dtype: torch.dtype, progress: Callable[[int, int], None]
) -> None:
    groups = list(_by_size(values.shapes, dtype))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        single = len(groups) == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {}
        for name in names:
            tensors[name] = values.value(name).to(dtype)
            weight_map[name] = file
            progress(len(weight_map), len(values.shapes))
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(groups) > 1:
        total = sum(shape.numel() for shape in values.shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))


def _by_size(shapes: dict[str, torch.Size], dtype: torch.dtype) -> Iterator[list[str]]:
    group: list[str] = []
    room = SHARD_BYTES
    for name, shape in shapes.items():
        size = shape.numel() * dtype.itemsize
        if group and size > room:
            yield group
            group, room = [], SHARD_BYTES
        group.append(name)
        room -= size
    yield group


def _write_config(config: PretrainedConfig, model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.use_cache = True
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


@torch.no_grad()
def _gate(model: nn.Module, values: FromCheckpoint, folder: Path, dtype: torch.dtype, attention: str) -> float:
    """Loads the folder as a user would, and compares. Returns the largest difference of a logit."""
    disable_progress_bar()
    AutoTokenizer.from_pretrained(folder, local_files_only=True)
    how = {"local_files_only": True, "attn_implementation": attention}
    reloaded: Any = AutoModelForCausalLM.from_pretrained(folder, **how)
    vocabulary = reloaded.config.vocab_size
    positions = getattr(reloaded.config, "max_position_embeddings", None) or 64
    ids = torch.from_numpy(permute(range(min(64, positions, vocabulary)), size=vocabulary, key=0))[None]
    theirs = reloaded.eval()(input_ids=ids).logits.float()
    del reloaded
    materialise(model, values, device=torch.device("cpu"))
    ours = model.eval()(input_ids=ids).logits.float()
    difference = float((ours - theirs).abs().max())
    if not difference <= TOLERANCE[dtype]:
        raise CheckpointError(
            f"the reloaded model's logits differ from the trained one's by {difference:.3g},"
            f" more than {TOLERANCE[dtype]}: the export is refused"
        )
    return difference
