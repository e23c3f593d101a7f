"""Exports a checkpoint to a Hugging Face folder, tensor by tensor, and refuses an export with wrong logits.

Weights are read from the shards one tensor at a time and written to safetensors files of bounded size: an export needs
the memory of one file. Then transformers loads the folder as it would for a user, and its logits are compared with
those of a model that the training code has filled from the checkpoint.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from data_prep.tokenizer.fingerprint import tokenizer_fingerprint
from foundation.directory import Manifest, parent_entry, staged, write_json
from foundation.errors import CheckpointError, DataError
from foundation.paths import is_store_url
from foundation.remote_directory import manifest_of
from foundation.remote_folder import local_tokens
from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.checkpoint.damage import find_damage
from pipeline.checkpoint.export.extras import ExportedModules, class_of, kept_extras, placeholders, write_counts
from pipeline.checkpoint.export.heldout import heldout_figures
from pipeline.checkpoint.export.read_weights import CheckpointWeights
from pipeline.checkpoint.export.trained_model import (
    attention_implementation,
    trained_config,
    trained_model,
    trained_positions,
)
from pipeline.checkpoint.export.write_safetensors import write_weights
from pipeline.data.permutation import permute
from pipeline.models.card.card import commit_with_card
from pipeline.models.card.facts import KEY as FACTS
from pipeline.models.card.facts import CardFacts, known_sources
from pipeline.models.card.lineage import KEY as LINEAGE
from pipeline.models.card.lineage import training_lineage
from pipeline.models.card.training_summary import distinct_sources
from pipeline.models.construction.buffers import computed_buffers
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import parameter_shapes
from pipeline.models.folder.beside_weights import GENERATION, read_generation, with_end
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.padding import longest_sequence
from pipeline.models.split_names import conversion
from pipeline.models.tokenizer_files import check_tokenizer_folder, copy_tokenizer, load_tokenizer

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest allowed difference of logits between two loads of the same weights: only summation order may differ."""

_HUB_FIELDS: dict[str, dict[str, str]] = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}
"""Fields of published configs that vLLM reads and transformers, which knows one kind of router, does not write."""


def export(  # noqa: PLR0913  all but two have defaults
    checkpoint: Checkpoint,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    facts: CardFacts | None = None,
    extra: str | None = None,
    ema: bool = False,
    replace: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Manifest:
    """Writes a checkpoint's model as a Hugging Face folder.

    Args:
        checkpoint: the checkpoint to export.
        out: the folder, which is created atomically.
        dtype: dtype of the written weights; None for the training dtype.
        tokenizer: tokenizer folder; None for the tokenizer of the run's first dataset.
        facts: facts that a person has written down for the model card and the training content summary, or None.
        extra: folder with the tensors of the starting model that were not trained, or "drop"; None for `model.path`.
        ema: whether to write the EMA of the weights (`run.ema`).
        replace: whether to replace an existing folder.
        progress: called with (tensors written, total tensors).

    Raises:
        CheckpointError: the checkpoint is damaged, or the exported model's logits differ from the trained one's.
        DataError: the folder exists, the tokenizer is not found, or the starting model's folder is gone or has changed
            and has tensors that the export keeps.
    """
    manifest = checkpoint.manifest
    damage = find_damage(checkpoint)
    if damage:
        raise CheckpointError(f"{checkpoint.path} is damaged: {damage}\n  try: an older checkpoint of the run")
    if "hf_config" not in manifest.details:
        why = "it was written by a custom training loop, which does not record its model"
        raise CheckpointError(f"{checkpoint.path} cannot be exported: {why}\n  try: a checkpoint of pipeline/train.py")
    if out.exists() and not replace:
        raise DataError(f"{out} exists already\n  try: another folder, or --replace")
    tokenizer = tokenizer or _tokenizer_of(manifest)
    _check_tokenizer(tokenizer, manifest)
    lineage = training_lineage(manifest)
    if facts is not None:
        known_sources(facts, [source["name"] for source in distinct_sources(lineage)])
    config = trained_config(manifest)
    trained = torch.bfloat16 if manifest.config["bf16"]["enabled"] else torch.float32
    dtype = dtype or trained
    weights = CheckpointWeights(checkpoint.path, ema=ema)
    if ema and not weights.shapes:
        raise CheckpointError(f"{checkpoint.path} has no EMA of the weights\n  try: run.ema in the config of the run")
    model = trained_model(manifest, dtype=dtype)
    _check_shapes(weights.shapes, parameter_shapes(model), checkpoint)
    kept = kept_extras(manifest, model, dtype=dtype, given=extra)
    modules = ExportedModules(model, weights, dtype=dtype)
    with staged(out) as staging:
        buffers = computed_buffers(model, weights)
        how: dict[str, Any] = {
            "extra": chain(kept, modules.copies()),
            "placed": partial(modules.placed, other=kept.placed),
        }
        write_weights(model, weights, buffers, staging, dtype=dtype, progress=progress, **how)
        if kept.multimodal is None:
            _write_config(config, model, staging, dtype, trained_positions=trained_positions(manifest, model))
            write_counts(config, staging, kept=bool(kept.names), trained=modules.count)
        else:
            kept.copy_beside(staging, dtype=dtype)
        _write_generation(config, manifest, staging)
        copy_tokenizer(tokenizer, staging)
        details = {
            "step": checkpoint.step,
            "dtype": str(dtype).removeprefix("torch."),
            "parameters": sum(shape.numel() for shape in weights.shapes.values()),
            LINEAGE: lineage,
            **({"ema": manifest.config["run"]["ema"]} if ema else heldout_figures(checkpoint)),
            **({"extra_weights": {"tensors": len(kept.names), "first": kept.names[:3]}} if kept.names else {}),
            **({} if facts is None else {FACTS: facts.model_dump(exclude_defaults=True)}),
            "tokenizer": _converted(tokenizer),
            "largest_logit_difference": _check_logits(
                model, weights, staging, dtype, attention_implementation(manifest)
            ),
        }
        parents = {"checkpoint": parent_entry(checkpoint.path, manifest.fingerprint)}
        fields: dict[str, Any] = {"config": manifest.config, "parents": parents, "details": details}
        return commit_with_card(staging, out, **fields, replace=replace)


def _tokenizer_of(manifest: Manifest) -> Path:
    parent = manifest.parents["data.sources.0"]
    tokens = str(parent["path"])
    try:
        found = manifest_of(tokens, kind="tokens").fingerprint
    except DataError as error:
        message = f"the run's tokenizer cannot be found: {error}\n  try: --tokenizer FOLDER"
        raise DataError(message) from None
    if found != parent["fingerprint"]:
        raise DataError(f"{tokens} is no longer the dataset of this run\n  try: --tokenizer FOLDER")
    return (local_tokens(tokens) if is_store_url(tokens) else Path(tokens)) / "tokenizer"


def _converted(tokenizer: Path) -> dict[str, str | None]:
    """Returns llama.cpp's name of the pre-tokenizer, or why llama.cpp has none."""
    found = conversion(tokenizer)
    return {"llama_cpp": found.name, "why": found.why}


def _check_tokenizer(folder: Path, manifest: Manifest) -> None:
    check_tokenizer_folder(folder)
    trained_on = manifest.details["tokenizer"]["fingerprint"]
    if (folder / "tokenizer.json").is_file() and tokenizer_fingerprint(folder) != trained_on:
        raise DataError(f"{folder} is not the tokenizer of the training: token ids would decode to other text")


def _check_shapes(found: dict[str, torch.Size], needed: dict[str, torch.Size], checkpoint: Checkpoint) -> None:
    if found != needed:
        different = sorted(set(found.items()) ^ set(needed.items()))[:4]
        names = ", ".join(f"{name} {tuple(shape)}" for name, shape in different)
        raise CheckpointError(f"{checkpoint.path} does not contain the model that its manifest describes: {names}")


def _write_config(
    config: PretrainedConfig, model: nn.Module, folder: Path, dtype: torch.dtype, *, trained_positions: int | None
) -> None:
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.use_cache = True
    for name, value in _HUB_FIELDS.get(config.model_type, {}).items():
        setattr(config, name, getattr(config, name, value))
    if trained_positions is not None:
        config.max_position_embeddings = trained_positions
    config.save_pretrained(folder)


def _write_generation(config: PretrainedConfig, manifest: Manifest, folder: Path) -> None:
    """Writes generation_config.json: the starting model's, if any, since that lists more end-of-turn tokens."""
    given = _given_generation(manifest)
    if given is None:
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    else:
        write_json(folder / GENERATION, with_end(given, manifest.details["tokenizer"].get("eos_id")))


def _given_generation(manifest: Manifest) -> dict[str, Any] | None:
    """Returns the starting model's recorded generation config; for older checkpoints its folder's, if unchanged."""
    if "generation" in manifest.details:
        recorded: dict[str, Any] | None = manifest.details["generation"]
        return recorded
    parent = manifest.parents.get("model.path")
    if parent is None or not (Path(parent["path"]) / GENERATION).is_file():
        return None
    folder = ModelFolder.open(parent["path"])
    return read_generation(folder.path) if folder.fingerprint() == parent["fingerprint"] else None


@torch.no_grad()
def _check_logits(
    model: nn.Module, weights: CheckpointWeights, folder: Path, dtype: torch.dtype, attention: str
) -> float:
    """Loads the folder as a user would, and compares the logits. Returns the largest difference.

    The loaded model is freed before the reference model gets its weights: only one is in memory at a time.
    """
    disable_progress_bar()
    load_tokenizer(folder)
    ids, exported = _logits_of_folder(folder, attention, model)
    gc.collect()  # a model with a cycle of references would otherwise stay in memory
    materialize(model, weights, device=torch.device("cpu"))
    trained = model.eval()(input_ids=ids, use_cache=False).logits.float()
    difference = float((trained - exported).abs().max())
    if not difference <= TOLERANCE[dtype]:
        raise CheckpointError(
            f"the reloaded model's logits differ from the trained one's by {difference:.3g},"
            f" more than {TOLERANCE[dtype]}: the export is refused"
        )
    return difference


def _logits_of_folder(folder: Path, attention: str, model: Any) -> tuple[Tensor, Tensor]:
    """Returns token ids [1, T] and the logits for them, fp32 [1, T, V], of the model in a folder."""
    options = {"local_files_only": True, "attn_implementation": attention}
    loaded: Any = class_of(folder).from_pretrained(folder, **options)
    vocabulary = model.config.vocab_size
    every = torch.from_numpy(permute(range(min(128, vocabulary)), size=vocabulary, key=0))
    ids = every[~torch.isin(every, torch.tensor(sorted(placeholders(folder)), dtype=every.dtype))]
    ids = ids[None, : min(64, longest_sequence(model) or 64)]
    return ids, loaded.eval()(input_ids=ids, use_cache=False).logits.float()
