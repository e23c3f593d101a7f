"""Config of weight-only quantization (`pipeline/quantize.py`). No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.base.section import Section
from pipeline.evaluation.data import HeldOutData

_BITS = {"int8": 8, "int4": 4}

# int4 needs small groups: a 16-bit scale for 32 weights costs half a bit per weight, and 32 is the smallest group that
# vLLM's Marlin kernels support (MARLIN_SUPPORTED_GROUP_SIZES in its marlin_utils.py)
_INT4_GROUP = 32


class QuantizeConfig(Section):
    """Weight-only quantization of linear layers: symmetric, round to nearest."""

    model: str = Field(
        description="Hugging Face folder of the floating-point model to quantize, e.g. out/demo/model, as written by"
        " headrace export"
    )
    output: str = Field(description="Directory of the quantized model, e.g. out/demo/model-int4; it must not exist yet")
    weights: Literal["int8", "int4"] = Field(
        description="Bits per quantized weight: int8, or int4, which needs group scales"
    )
    group_size: int | None = Field(
        default=None,
        ge=1,
        description="Group size: weights of one row that share a scale, e.g. 128; null: the whole row for int8, 32 for"
        " int4",
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
    data: HeldOutData = Field(description="Held-out data on which the model is evaluated before and after quantization")

    @property
    def bits(self) -> int:
        """Bits per quantized weight, without its scale."""
        return _BITS[self.weights]

    @property
    def group(self) -> int | None:
        """Weights per scale; None for one scale per output row."""
        return self.group_size if self.group_size is not None or self.weights == "int8" else _INT4_GROUP
