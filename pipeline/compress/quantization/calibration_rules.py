"""Rules for the calibration text of a quantization and of an importance matrix. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from gguf import GGMLQuantizationType

from foundation.errors import ConfigError
from pipeline.compress.quantization.config import CalibrationSection, QuantizeConfig
from pipeline.data.dataset import TokenDataset
from pipeline.evaluation.heldout.data import HeldOutData
from pipeline.models.gguf import libllama
from pipeline.models.gguf.types import FILE_TYPES, UNWEIGHTED


def open_split(data: HeldOutData, calibration: CalibrationSection) -> TokenDataset:
    """Opens the split for calibration, or for the sensitivity measurement of mixed bits.

    Raises:
        DataError: there is no such split, or it is shorter than one window.
    """
    return TokenDataset.open(data.path, split=calibration.split, sequence_length=data.sequence_length)


def open_calibration(data: HeldOutData, calibration: CalibrationSection) -> TokenDataset:
    """Opens the split, and checks that it has enough windows.

    Raises:
        ConfigError: the split has too few windows.
        DataError: there is no such split, or it is shorter than one window.
    """
    dataset, samples = open_split(data, calibration), calibration.samples
    if samples > dataset.windows:
        why = f"the split {calibration.split} has {dataset.windows} windows of {data.sequence_length} tokens"
        raise ConfigError("calibration.samples", samples, why=why, remedy=f"use {dataset.windows} or less")
    return dataset


def plan_calibration(config: QuantizeConfig, layers: Mapping[str, tuple[int, int]]) -> TokenDataset:
    """Opens the calibration split, which has the held-out data's tokenizer.

    Args:
        config: config with a calibrated method.
        layers: name -> (outputs, inputs) of the linear layers of a folder.

    Raises:
        ConfigError: the split has too few windows, or for GPTQ its windows have fewer tokens than a layer has inputs.
        DataError: there is no such split, or it is shorter than one window.
    """
    length, samples = config.data.sequence_length, config.calibration.samples
    dataset = open_calibration(config.data, config.calibration)
    widest, (_, inputs) = max(layers.items(), key=lambda item: item[1][1], default=("", (0, 0)))
    if config.method == "gptq" and samples * length < inputs:
        why = f"{widest} has {inputs} inputs, and {samples} windows have {samples * length} tokens"
        raise ConfigError("calibration.samples", samples, why=why, remedy=f"use {-(-inputs // length)} or more")
    return dataset


def check_imatrix(config: QuantizeConfig) -> None:
    """Checks that an importance matrix changes a GGUF file, and that it can be computed.

    Raises:
        ConfigError: the matrix changes nothing, or llama.cpp's library is missing.
    """
    names: list[str] = list(config.budget.candidates) if config.budget else [config.scheme]
    if config.budget:
        weighted = any(GGMLQuantizationType[name] not in UNWEIGHTED for name in names)
    else:
        weighted = FILE_TYPES[config.scheme].weighted
    shown = ", ".join(names)
    if not weighted:
        why = f"an importance matrix changes nothing in {shown}"
        raise ConfigError("imatrix", True, why=why, remedy="leave it out, or use Q4_K_M, say")
    if not libllama.installed():
        why = f"{shown} with an importance matrix is computed by llama.cpp's library, which is not installed"
        raise ConfigError("imatrix", True, why=why, remedy=f"pip install {libllama.PACKAGE}, or leave it out")
