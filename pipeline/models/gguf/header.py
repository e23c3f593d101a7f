"""Writes the part of a GGUF file before its tensors: keys, tokenizer, and the location of each tensor. No torch."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, quant_shape_to_byte_shape

from pipeline.models.gguf import architectures
from pipeline.models.gguf.plan import GgufPlan, GgufTensor
from pipeline.models.gguf.types import FILE_TYPES


def open_writer(plan: GgufPlan, file: Path) -> GGUFWriter:
    """Opens a writer and writes the header; the caller adds tensors in the order of the plan.

    Args:
        plan: plan of the file.
        file: path of the file to write.
    """
    config = plan.source.config
    writer = GGUFWriter(file, MODEL_ARCH_NAMES[plan.architecture.arch])
    writer.add_name(Path(plan.source.origin).name)  # also right for a URL, whose local copy has another name
    writer.add_file_type(FILE_TYPES[plan.type].number)
    architectures.write_keys(writer, config, plan.architecture)
    plan.tokenizer.write(writer)
    factors = architectures.rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for tensor in plan.tensors:
        _announce(writer, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    return writer


def header_bytes(plan: GgufPlan) -> int:
    """Returns a file's bytes without the plan's tensors; they do not depend on the tensors' types."""
    with TemporaryDirectory(prefix="headrace-gguf-") as folder:
        file = Path(folder) / "model.gguf"
        open_writer(plan, file).close()
        return file.stat().st_size


def _announce(writer: GGUFWriter, tensor: GgufTensor) -> None:
    if tensor.type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        dtype: Any = np.float32 if tensor.type is GGMLQuantizationType.F32 else np.float16
        size = int(np.prod(tensor.shape)) * np.dtype(dtype).itemsize
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(dtype), size)
        return
    shape = quant_shape_to_byte_shape(tensor.shape, tensor.type)
    writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=tensor.type)
