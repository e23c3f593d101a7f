"""Plans a GGUF file: the tensors of a Hugging Face folder, with their names and types in the file. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from foundation.errors import ConfigError
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.gguf import architectures, libllama
from pipeline.models.gguf.architectures import GgufArchitecture
from pipeline.models.gguf.tokenizer import GgufTokenizer, read_tokenizer
from pipeline.models.gguf.types import FILE_TYPES, FLOATING_POINT, FileType, type_of


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file.

    Attributes:
        name: name in the file.
        sources: names in the folder: one, or one for each expert in their order.
        shape: shape in the file; the last dim is the row.
        type: type of ggml.
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    type: GGMLQuantizationType

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tensor's values in the file."""
        elements, block_bytes = GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // int(elements) * int(block_bytes)


@dataclass(frozen=True)
class GgufPlan:
    """A checked conversion.

    Attributes:
        source: the folder.
        type: name of the file's type.
        tensors: tensors in the order of the file.
    """

    source: ModelFolder
    type: str
    architecture: GgufArchitecture
    tokenizer: GgufTokenizer
    tensors: tuple[GgufTensor, ...]

    @property
    def quantized(self) -> tuple[GgufTensor, ...]:
        """Tensors that are not stored in floating point."""
        return tuple(tensor for tensor in self.tensors if tensor.type not in FLOATING_POINT)

    def check_context(self, length: int) -> None:
        """Refuses windows of `length` tokens if the file's attention does not cover them.

        Raises:
            ConfigError: llama.cpp's loader has no sliding window for the architecture.
        """
        longest = architectures.context_length(self.source.config, self.architecture)
        if length > longest:
            why = (
                f"llama.cpp knows no sliding window for this architecture, so the file is for {longest} tokens at most"
            )
            raise ConfigError("data.sequence_length", length, why=why, remedy=f"use {longest} or less")


def plan_file(source: ModelFolder, type_name: str) -> GgufPlan:
    """Checks that a folder can be written as a GGUF file.

    Raises:
        ConfigError: the architecture, the tokenizer, a tensor or the type cannot be written; names the possible ones.
    """
    file_type = FILE_TYPES.get(type_name)
    if file_type is None:
        raise ConfigError("scheme", type_name, why="no such type", remedy=f"use one of {', '.join(FILE_TYPES)}")
    if file_type.needs_libllama and not libllama.installed():
        why = "K-quants are computed by llama.cpp's library, which is not installed"
        raise ConfigError("scheme", type_name, why=why, remedy=f"pip install {libllama.PACKAGE}, or use Q8_0 or Q4_0")
    architecture = architectures.architecture_of(source.config)
    tokenizer = read_tokenizer(source.path, vocabulary=source.vocab_size)
    return GgufPlan(source, type_name, architecture, tokenizer, tuple(_tensors(source, architecture, file_type)))


def _tensors(source: ModelFolder, architecture: GgufArchitecture, file_type: FileType) -> Iterator[GgufTensor]:
    config = source.config
    names, layers = architectures.name_map(config, architecture), architectures.layer_count(config)
    groups: dict[str, list[str]] = {}
    for name in source.tensors:
        if name == "lm_head.weight" and source.tied:
            continue  # a copy of the embedding
        stored = architectures.stored_name(name, names)
        if stored is None:
            if name.endswith(_COMPUTED):
                continue
            why = f"llama.cpp has no tensor for {name}"
            raise ConfigError("model", str(source.path), why=why, remedy="serve the Hugging Face folder")
        groups.setdefault(stored, []).append(name)
    for stored, sources in groups.items():
        numbers = [architectures.expert_number(name) for name in sources]
        if len(set(numbers)) < len(sources) or (None in numbers and len(sources) > 1):
            why = f"{' and '.join(sources[:3])} are one tensor of llama.cpp, {stored}"
            raise ConfigError("model", str(source.path), why=why, remedy="remove the copies that are not meant")
        ordered = tuple(sorted(sources, key=lambda name: architectures.expert_number(name) or 0))
        one = architectures.stored_shape(sources[0], source.tensors[sources[0]].shape, architecture)
        shape = (len(ordered), *one) if architectures.expert_number(sources[0]) is not None else one
        kind = type_of(stored, shape, file_type, layers=layers, tied=source.tied)
        yield GgufTensor(stored, ordered, shape, kind)


_COMPUTED = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
"""Buffers that old folders contain; llama.cpp computes them."""
