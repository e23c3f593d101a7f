"""Metadata of a Hugging Face model folder: config.json and the safetensors headers. No torch.

A safetensors file is: uint64 little-endian length N of the header; N bytes of JSON, name -> {dtype, shape,
data_offsets [begin, end)} counted from the end of the header; the tensors' bytes back to back. So names, shapes and
the size the file must have are known after reading a few kilobytes.
Source: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from headrace.base.directory import MANIFEST, check_sizes, fingerprint_of, read_manifest, sha256_of_file
from headrace.base.errors import DataError
from pipeline.config.rules.renamed_keys import upgrade_keys

CONFIG = "config.json"
_TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_EXPORT = "make one with: headrace export RUN OUT"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file: dtype by its safetensors name (F32, BF16, I32, ...), shape, bytes on disk."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class ModelFolder:
    """A model folder, without loading the weights. Use `ModelFolder.open`.

    Attributes:
        path: the folder.
        config: its parsed config.json.
        tensors: tensor name -> its header entry, over all safetensors files.
        weight_bytes: size of the safetensors files on disk, headers included.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    weight_bytes: int

    @classmethod
    def open(cls, path: str | Path) -> ModelFolder:
        """Reads config.json and the headers, and checks every weight file's size.

        Raises:
            DataError: no such folder, no config.json, no safetensors, or a file that is truncated or damaged.
        """
        path = Path(path)
        config = _read_config(path)
        if (path / MANIFEST).is_file():
            check_sizes(path, read_manifest(path, kind="model"))
        files = _weight_files(path)
        tensors = {name: info for file in files for name, info in read_header(file).items()}
        return cls(path, config, tensors, sum(file.stat().st_size for file in files))

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: rows of the embedding; token ids are below it."""
        return int(self._text_config("vocab_size"))

    @property
    def longest_sequence(self) -> int | None:
        """max_position_embeddings, or None if the config sets no limit."""
        longest = self._text_config("max_position_embeddings", None)
        return None if longest is None else int(longest)

    @property
    def tied(self) -> bool:
        """Whether input and output embeddings are tied; if the config does not say so, whether no head is stored."""
        declared = self._text_config("tie_word_embeddings", None)
        return "lm_head.weight" not in self.tensors if declared is None else bool(declared)

    @property
    def quantized_by(self) -> str | None:
        """The quantization method in `quantization_config`, or None for a floating-point model."""
        section = self.config.get("quantization_config")
        return None if section is None else str(section.get("quant_method", "unknown"))

    @property
    def quantizes_activations(self) -> bool:
        """Whether layers round their inputs while the model serves, by its `quantization_config`."""
        return any(group.get("input_activations") for group in scheme_groups(self.config))

    @property
    def dtype(self) -> str:
        """The floating-point dtype of most bytes, by its torch name."""
        sizes = {word: sum(i.bytes for i in self.tensors.values() if i.dtype == word) for word in _TORCH_DTYPES}
        return _TORCH_DTYPES[max(sizes, key=lambda word: sizes[word])]

    @property
    def parameters(self) -> int:
        """Number of stored parameters; tied ones count once. Only meaningful for unquantized folders."""
        return sum(prod(info.shape) for info in self.tensors.values())

    def fingerprint(self) -> str:
        """The manifest's fingerprint, or without a manifest the SHA-256 over its files' checksums."""
        if (self.path / MANIFEST).is_file():
            return read_manifest(self.path, kind="model").fingerprint
        files = sorted(p for p in self.path.iterdir() if p.is_file())
        return fingerprint_of({file.name: sha256_of_file(file) for file in files})

    def _text_config(self, key: str, *default: Any) -> Any:
        """A key of the config; models with several modalities keep it under `text_config`."""
        text = self.config.get("text_config", {})
        if key in self.config or key in text or default:
            return self.config.get(key, text.get(key, *default))
        raise DataError(f"{self.path / CONFIG} has no '{key}': not a language model's config\n  try: {_EXPORT}")


def scheme_groups(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of layers in the quantization_config of a Hugging Face config, each with a scheme of its own."""
    return list(((config.get("quantization_config") or {}).get("config_groups") or {}).values())


def trained_data(path: Path) -> dict[str, Any]:
    """The section `data` of the config in a model directory's manifest, under today's keys; empty without a manifest.

    Args:
        path: a Hugging Face folder or a directory with a GGUF file.
    """
    if not (path / MANIFEST).is_file():
        return {}
    section = upgrade_keys(read_manifest(path, kind="model").config).get("data")
    return section if isinstance(section, dict) else {}


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file.

    Raises:
        DataError: the header cannot be read, or the file does not have the length given in the header.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            # a damaged length must not cause a read of gigabytes
            raw = json.loads(file.read(min(length, path.stat().st_size)))
        tensors = {name: _tensor(entry) for name, entry in raw.items() if name != "__metadata__"}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: its header cannot be read ({error})\n  try: {_EXPORT}") from None
    expected, found = 8 + length + sum(info.bytes for info in tensors.values()), path.stat().st_size
    if found != expected:
        why = f"has {found} bytes, and {expected} by its header: truncated or overwritten"
        raise DataError(f"{path} {why}\n  try: copy or export it again")
    return tensors


def _tensor(entry: dict[str, Any]) -> TensorInfo:
    begin, end = entry["data_offsets"]
    return TensorInfo(entry["dtype"], tuple(entry["shape"]), end - begin)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise DataError(f"{path}: no such directory\n  try: {_EXPORT}")
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} has no {CONFIG}: not a Hugging Face model folder\n  try: {_EXPORT}") from None
    except ValueError as error:
        raise DataError(f"{path / CONFIG} is not JSON: {error}\n  try: {_EXPORT}") from None
    if not isinstance(config, dict):
        raise DataError(f"{path / CONFIG} holds a {type(config).__name__}, not an object\n  try: {_EXPORT}")
    return config


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files; of a sharded model, those in its index, so that a missing shard is detected."""
    index = path / "model.safetensors.index.json"
    names = sorted(p.name for p in path.glob("*.safetensors"))
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{index} is damaged: {error!r}\n  try: {_EXPORT}") from None
    if not names:
        raise DataError(f"{path} holds no *.safetensors\n  try: save the model with transformers' save_pretrained")
    missing = next((name for name in names if not (path / name).is_file()), None)
    if missing is not None:
        raise DataError(f"{path / missing} is missing; {index.name} lists it\n  try: copy or export the folder again")
    return [path / name for name in names]
