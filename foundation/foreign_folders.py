"""Folders of other tools, recognized by the files in them, and how to use or import each folder.

One table, used wherever a folder is opened: `model.path`, data, runs and checkpoints. Only names in the folder and its
subfolders are read: a folder on a slow disk costs a listing or two.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePath

from foundation.errors import DataError, HeadraceError

_LOOKED_AT = 1000
"""Most names read in a folder: folders of tokens may have very many."""
TRAINED_BY_TRAINER = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
"""Files beside the model in a checkpoint of the Hugging Face Trainer; with DeepSpeed or FSDP, only the first."""


@dataclass(frozen=True)
class Foreign:
    """A kind of folder that another tool writes.

    Attributes:
        name: the kind in words, with the tool's name.
        marks: patterns of paths in the folder, with `/` for a subfolder; each pattern has to match a path.
        remedy: advice on how to use the folder, with `FOLDER` for its path.
        checkpoint: whether `headrace import` also takes its optimizer state and step.
    """

    name: str
    marks: tuple[str, ...]
    remedy: str
    checkpoint: bool = False


_TOKENS = 'then run headrace prep over it, with a source {"type": "jsonl", "path": "texts.jsonl"}'
_IMPORT = "headrace import FOLDER OUT --tokenizer ITS_TOKENIZER, which keeps its documents"
_TEXT_OR_IDS = f"{_IMPORT}, where it holds ids; text: export it to JSON lines, {_TOKENS}"
_WEIGHTS = 'then give the folder as "model": {"path": ...}: its weights are taken, its optimizer state is not'
_RESUMED = (
    "headrace import FOLDER RUN_DIR --config train.json, which takes weights, optimizer state and step; for the weights"
    " alone headrace export RUN_DIR OUT after that, and OUT as model.path"
)

KINDS = (
    Foreign("a checkpoint of DeepSpeed (ZeRO)", ("*/*zero_pp_rank_*_optim_states.pt",), _RESUMED, checkpoint=True),
    Foreign(
        "a checkpoint of DeepSpeed (ZeRO), of one step", ("*zero_pp_rank_*_optim_states.pt",), _RESUMED, checkpoint=True
    ),
    Foreign("a universal checkpoint of DeepSpeed", ("zero/*", "*_model_states.pt"), _RESUMED, checkpoint=True),
    Foreign(
        "a folder of universal checkpoints of DeepSpeed", ("*/zero", "latest_universal"), _RESUMED, checkpoint=True
    ),
    Foreign("a checkpoint of DeepSpeed without ZeRO", ("*/mp_rank_*_model_states.pt",), _RESUMED, checkpoint=True),
    Foreign(
        "a checkpoint of Megatron-LM (torch)",
        ("*/mp_rank_*/model_optim_rng.pt",),
        f"convert it to a Hugging Face folder with Megatron-LM's tools/checkpoint or Megatron Bridge, {_WEIGHTS}",
    ),
    Foreign("checkpoints of Megatron-LM", ("latest_checkpointed_iteration.txt",), _RESUMED, checkpoint=True),
    Foreign("a distributed checkpoint of torch (DCP)", (".metadata", "*.distcp"), _RESUMED, checkpoint=True),
    Foreign("a folder of checkpoints of torchtitan", ("step-*/.metadata",), _RESUMED, checkpoint=True),
    Foreign(
        "the output folder of the Hugging Face Trainer",
        ("checkpoint-*/trainer_state.json",),
        "headrace import FOLDER/checkpoint-N RUN_DIR --config train.json, which takes weights, optimizer state and"
        " step; or FOLDER/checkpoint-N as model.path, for its weights alone",
        checkpoint=True,
    ),
    Foreign(
        "a checkpoint of the Hugging Face Trainer",
        ("trainer_state.json",),
        "headrace import FOLDER RUN_DIR --config train.json, which takes weights, optimizer state and step; or as"
        " model.path, for its weights alone",
        checkpoint=True,
    ),
    Foreign("a checkpoint of accelerate (save_state)", ("optimizer.bin",), _RESUMED, checkpoint=True),
    Foreign(
        "a checkpoint of accelerate (save_state), FSDP",
        ("optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata"),
        _RESUMED,
        checkpoint=True,
    ),
    Foreign("a folder of chunks of litdata", ("index.json", "chunk-*.bin"), _TEXT_OR_IDS),
    Foreign("a folder of chunks of litdata, by split", ("*/index.json", "*/chunk-*.bin"), _TEXT_OR_IDS),
    Foreign("a folder of MDS shards of MosaicML streaming", ("index.json", "shard.*.mds*"), _TEXT_OR_IDS),
    Foreign("a folder of MDS shards of MosaicML streaming, by split", ("*/index.json", "*/shard.*.mds*"), _TEXT_OR_IDS),
    Foreign("a dataset of datasets.save_to_disk", ("dataset_info.json", "*.arrow"), _TEXT_OR_IDS),
    Foreign("a dataset of datasets.save_to_disk, by split", ("dataset_dict.json",), _TEXT_OR_IDS),
    Foreign(
        "tokens of datatrove or nanotron",
        ("*.ds", "*.ds.index"),
        "give it as data.sources.0.path with data.sources.0.tokenizer, which reads it in place; or " + _IMPORT,
    ),
    Foreign("tokens of datatrove or nanotron without an index", ("*.ds",), _IMPORT + " by the end-of-text id"),
    Foreign(
        "a checkpoint of nanoGPT",
        ("ckpt.pt",),
        "turn it into a Hugging Face folder by the lines of docs/how-to/import-checkpoints.md, nanoGPT, "
        + _WEIGHTS.removeprefix("then "),
    ),
    Foreign("tokens of llm.c", ("*_train_*.bin",), _IMPORT),
    Foreign("tokens of nanoGPT", ("train.bin",), _IMPORT),
    Foreign("tokens of OLMo (flat .npy)", ("*.npy",), _IMPORT),
    Foreign(
        "tokens of Megatron-LM",
        ("*.bin", "*.idx"),
        "name the files without their suffix, FOLDER/NAME for FOLDER/NAME.bin and .idx, with data.sources.0.tokenizer"
        " and data.sources.0.heldout (or evaluation.samples 0)",
    ),
    Foreign(
        "a checkpoint of nanotron",
        ("checkpoint_metadata.json", "model/*"),
        f"convert it with nanotron's examples/llama/convert_nanotron_to_hf.py, {_WEIGHTS}",
    ),
    Foreign(
        "a checkpoint of OLMo-core",
        ("config.*", "model_and_optim/*"),
        f"convert it with OLMo-core's src/examples/huggingface/convert_checkpoint_to_hf.py, {_WEIGHTS}",
    ),
    Foreign("a Hugging Face model folder", ("config.json", "*.safetensors"), "give it as model.path"),
    Foreign(
        "a folder of Parquet files",
        ("*.parquet",),
        'headrace prep over it, with a source {"type": "parquet", "path": "FOLDER/*.parquet"}; or, where it holds'
        f" input_ids, {_IMPORT}",
    ),
    Foreign(
        "a tokens directory of headrace",
        ("manifest.json", "tokenizer/*"),
        "give it as data.sources.0.path, or --data",
    ),
)
"""All kinds; the first whose marks all match is taken."""


def recognise(folder: Path) -> Foreign | None:
    """Returns the kind of a folder or file of another tool, with its path in the remedy; None if it is unknown."""
    try:
        names = [folder.name] if folder.is_file() else list(_names(folder))
    except OSError:
        return None
    for kind in KINDS:
        if all(any(fnmatchcase(name, mark) for name in names) for mark in kind.marks):
            # a checkpoint is read as a whole folder, whichever of its files was named
            place = folder.parent if kind.checkpoint and folder.is_file() else folder
            named = kind.remedy.replace("FOLDER", str(place))
            return replace(kind, remedy=named)
    return None


def file_beside(file: Path, name: str, error: type[HeadraceError] = DataError) -> Path:
    """Returns the path that a foreign file names in its folder, e.g. an index its shards, `latest` a step's folder.

    Raises:
        error: the path leads out of the folder.
    """
    if leads_out(name):
        why = f"{file} names {name}, which is not in the folder: refused"
        raise error(f"{why}\n  try: copy or download the folder again; what a file names has to be in its folder")
    return file.parent / name


def leads_out(name: str) -> bool:
    """Whether a relative path in a foreign file leads out of the file's folder."""
    path = PurePath(name)
    return path.is_absolute() or ".." in path.parts


def is_trainer_checkpoint(folder: Path) -> bool:
    """Whether a model folder is a checkpoint of the Hugging Face Trainer, with more than the model."""
    return any((folder / name).is_file() for name in TRAINED_BY_TRAINER)


def what_it_is(folder: Path, otherwise: str) -> str:
    """Returns the end of an error about a wrong folder: its kind and remedy, or `otherwise` if it is unknown."""
    found = recognise(folder)
    return f"; it is {found.name}\n  try: {found.remedy}" if found else f"\n  try: {otherwise}"


def _names(folder: Path) -> Iterator[str]:
    """Yields names in a folder and its subfolders, down to `global_step9/mp_rank_00/x.pt`."""
    for entry in _entries(folder):
        yield entry.name
        if entry.is_dir():
            for below in _entries(Path(entry.path)):
                yield f"{entry.name}/{below.name}"
                if below.is_dir() and below.name.startswith("mp_rank_"):
                    yield from (f"{entry.name}/{below.name}/{each.name}" for each in _entries(Path(below.path)))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(islice(entries, _LOOKED_AT), key=lambda entry: entry.name)
