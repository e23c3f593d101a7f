"""The config of `pipeline/quantize.py`. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.base.section import Section
from pipeline.evaluation.data import HeldOutData

_BITS = {"int8": 8, "int4": 4}

# 16 levels need a scale for few weights: 32 costs half a bit per weight (a 16-bit scale), and is the smallest group
# that vLLM's Marlin kernels take (MARLIN_SUPPORTED_GROUP_SIZES in its marlin_utils.py)
_INT4_GROUP = 32


class QuantizeConfig(Section):
    """Weight-only quantization of the linear layers, symmetric, rounded to nearest."""

    model: str = Field(
        description="a Hugging Face model folder in floating point, e.g. made by python -m pipeline export"
    )
    output: str = Field(description="the directory to write; it must not exist yet")
    weights: Literal["int8", "int4"] = Field(description='"int8" or "int4"')
    group_size: int | None = Field(
        default=None,
        ge=1,
        description="weights of one row that share a scale; null is the whole row for int8 and 32 for int4",
    )
    skip: list[str] = Field(
        default=["lm_head"],
        description='modules to leave alone: full names such as "model.layers.0.mlp.up_proj", or "re:" and a pattern',
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description='of the scales and the unquantized rest: "bfloat16", "float16" or "float32"; null is the model\'s',
    )
    data: HeldOutData = Field(description="the split on which the model is measured before and after")

    @property
    def bits(self) -> int:
        """Bits of one quantized weight, its scale not counted."""
        return _BITS[self.weights]

    @property
    def group(self) -> int | None:
        """Weights per scale; None for one scale per output row."""
        return self.group_size if self.group_size is not None or self.weights == "int8" else _INT4_GROUP
