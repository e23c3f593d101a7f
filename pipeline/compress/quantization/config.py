"""Config of a quantization (`pipeline/quantize.py`). No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from foundation.paths import PathOrUrl
from foundation.section import Section
from pipeline.evaluation.heldout.data import HeldOutData

# int4 needs small groups: a 16-bit scale for 32 weights costs half a bit per weight, and 32 is the smallest group that
# vLLM's Marlin kernels support (MARLIN_SUPPORTED_GROUP_SIZES in its marlin_utils.py)
_INT4_GROUP = 32


@dataclass(frozen=True)
class Scheme:
    """Number format of quantized weights and activations.

    Attributes:
        bits: bits per quantized weight, without its scale.
        kind: "int", or "float" for e4m3.
        activations: whether layer inputs are rounded to 8 bits, too, with a scale per token computed while serving
            (dynamic).
        group: number of weights of a row that share a scale; None for one scale per output row.
    """

    bits: int
    kind: Literal["int", "float"] = "int"
    activations: bool = False
    group: int | None = None


SCHEMES = {
    "W4A16": Scheme(4, group=_INT4_GROUP),
    "W8A16": Scheme(8),
    "W8A8": Scheme(8, activations=True),
    "FP8": Scheme(8, kind="float", activations=True),
}
"""Schemes of Hugging Face folders by their name in vLLM and llm-compressor: W bits of weights, A bits of activations.
Every other name in `QuantizeConfig.scheme` is a type of GGUF files (`pipeline.models.gguf.types`)."""

MIXED = "mixed"
"""Scheme name for layers with schemes of their own, within a byte budget."""

SchemeName = Literal[
    "W4A16", "W8A16", "W8A8", "FP8", "mixed",
    "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K", "BF16", "F16", "F32",
]  # fmt: skip


class CalibrationSection(Section):
    """The text that a model is run on, to measure the inputs of its layers."""

    split: str = Field(default="train", description="Split of data.path that is read: train or heldout")
    samples: int = Field(
        default=128,
        ge=1,
        description="Windows of data.sequence_length tokens, evenly spaced over the split, e.g. 256; at least as many"
        " tokens in all as the widest layer has inputs",
    )


class QuantizeCalibration(CalibrationSection):
    """The text that calibrated methods measure the inputs of layers on."""

    iterations: int = Field(
        default=200,
        ge=1,
        description="auto-round: number of batches of data.batch_size windows on which the rounding of each decoder"
        " layer is learnt, e.g. 400",
    )


Candidate = Literal[
    "W4A16", "W8A16", "W8A8", "FP8", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q3_K", "Q2_K",
]  # fmt: skip


class BudgetSection(Section):
    """Mixed bits: the largest size of the weights, and the candidate schemes of each layer."""

    bytes: int | None = Field(
        default=None, ge=1, description="Largest size of the weight files, e.g. 2e6; or give bits_per_weight"
    )
    bits_per_weight: float | None = Field(
        default=None, gt=0, description="The same in bits for each parameter of the model, e.g. 6.5; or give bytes"
    )
    candidates: list[Candidate] = Field(
        default=["W4A16", "W8A8"],
        min_length=1,
        description='What a layer may become, beside staying as it is, e.g. ["W4A16", "FP8"]; or, for a GGUF file,'
        ' types of its tensors, e.g. ["Q3_K", "Q4_K", "Q6_K", "Q8_0"]',
    )
    samples: int = Field(
        default=16,
        ge=1,
        description="Windows of calibration.split that the KL divergence of every layer is measured on, e.g. 32",
    )


class QuantizeConfig(Section):
    """Quantization of linear layers: symmetric, weights rounded to the nearest or calibrated."""

    model: PathOrUrl = Field(
        description="Floating-point model to quantize: a Hugging Face folder, e.g. out/demo/model, or a run directory"
        " or checkpoint of any layout, e.g. runs/teacher, which is exported first"
    )
    output: PathOrUrl = Field(
        description="Directory of the quantized model, or its URL, e.g. s3://bucket/model-int4; it must not exist yet"
    )
    scheme: SchemeName = Field(
        description="Quantization scheme. A Hugging Face folder for vLLM and transformers: W4A16 (weights in 4-bit"
        " integers, in groups), W8A8 (8-bit integers, activations too: the 8 bits that vLLM serves on a CPU), FP8"
        " (e4m3, activations too), W8A16 (8-bit integers). A GGUF file for llama.cpp: Q8_0, Q6_K, Q5_K_M, Q4_K_M,"
        " Q4_0, Q3_K_M, Q2_K, or unquantized BF16, F16, F32. mixed: each layer the one of budget.candidates that"
        " keeps the predictions nearest to the original's within the budget"
    )
    budget: BudgetSection | None = Field(
        default=None, description='Of scheme mixed, e.g. {"bytes": 2e6}: the size that must not be exceeded'
    )
    head: Literal["W4A16", "W8A16", "W8A8", "FP8"] | None = Field(
        default=None,
        description="Scheme of lm_head in a Hugging Face folder, e.g. W8A8; null: scheme, where skip does not name it."
        " A tied head needs untie",
    )
    untie: bool = Field(
        default=False, description="Give a tied head weights of its own, so that it can be quantized: true or false"
    )
    method: Literal["rtn", "gptq", "auto-round"] = Field(
        default="rtn",
        description="How weights are rounded: rtn (to the nearest, without data) or gptq (calibrated on text: the error"
        " of the layers' outputs is made small) or auto-round (which way each weight is rounded is learnt on text, for"
        " integers); GGUF types are rtn",
    )
    smoothing: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Smoothing before rounding, with this exponent: outliers of single channels go from activations"
        " into weights, or back, by factors that are folded into norms and layers, e.g. 0.5; null: none",
    )
    rotation: bool = Field(
        default=False,
        description="Turn the residual stream and the values of attention by Hadamard matrices that are folded into the"
        " weights, before smoothing and rounding, so that no channel stands out, e.g. true; needs RMS norms and a head"
        " that is not tied",
    )
    calibration: QuantizeCalibration = Field(
        default_factory=QuantizeCalibration,
        description="Text that gptq, auto-round, smoothing and imatrix are calibrated on",
    )
    imatrix: bool = Field(
        default=False,
        description="GGUF types except Q8_0: weigh the rounding errors of a matrix by the mean squares of its inputs on"
        " calibration text, llama.cpp's importance matrix, e.g. true",
    )
    group_size: int | None = Field(
        default=None,
        ge=1,
        description="Group size: weights of one row that share a scale, e.g. 128; null: 32 for W4A16, the whole row for"
        " the others, of which W8A8 and FP8 take nothing else. GGUF types have group sizes of their own",
    )
    skip: list[str] = Field(
        default=["lm_head"],
        description='Modules left unquantized, e.g. ["lm_head", "re:.*down_proj$"]: full names, or "re:" and a regular'
        " expression",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="dtype of scales and unquantized weights: bfloat16, float16 or float32; null: the model's own",
    )
    consumers: list[str] | None = Field(
        default=None,
        description='Programs that have to score the result before it gets its name, e.g. ["transformers", "vllm"]; '
        " null: every one that is installed and takes the scheme (headrace compress consumers lists them)",
    )
    max_mean_kl: float | None = Field(
        default=None,
        gt=0,
        description="Largest mean KL divergence from the original, in nats, that is accepted, e.g. 0.05; null: the"
        " bound of the scheme (docs/reference/consumers.md)",
    )
    data: HeldOutData = Field(description="Held-out data on which the model is evaluated before and after quantization")

    @property
    def gguf(self) -> bool:
        """Whether a GGUF file is written in place of a Hugging Face folder."""
        first = self.budget.candidates[0] if self.scheme == MIXED and self.budget else self.scheme
        return first not in (*SCHEMES, MIXED)

    @property
    def calibrated(self) -> bool:
        """Whether the inputs of layers are measured on text."""
        return self.method != "rtn" or self.smoothing is not None or self.imatrix

    @property
    def what(self) -> Scheme:
        """The scheme of a Hugging Face folder."""
        return SCHEMES[self.scheme]

    @property
    def group(self) -> int | None:
        """Weights per scale in a Hugging Face folder; None for one scale per output row, and for GGUF files."""
        return self.group_size or self.what.group if self.scheme in SCHEMES else None
