"""Config of a pruning (`pipeline/prune.py`). No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from foundation.paths import PathOrUrl
from foundation.section import Count, Section
from pipeline.compress.quantization.config import CalibrationSection
from pipeline.evaluation.heldout.data import HeldOutData

AxisName = Literal[
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_key_value_heads",
    "num_experts",
    "num_hidden_layers",
]


class ShapeSection(Section):
    """Sizes of the pruned model; those that are not given stay."""

    hidden_size: Count | None = Field(
        default=None, description="Residual channels, the same in all layers, embeddings and norms, e.g. 128"
    )
    intermediate_size: Count | None = Field(
        default=None, description="FFN channels of a layer, e.g. 256; of an expert of Mixtral"
    )
    moe_intermediate_size: Count | None = Field(
        default=None, description="FFN channels of an expert, e.g. 128 (Qwen3-MoE)"
    )
    num_key_value_heads: Count | None = Field(
        default=None, description="Key/value heads of a layer, e.g. 1; each keeps the query heads of its group"
    )
    num_experts: Count | None = Field(default=None, description="Routed experts of a layer, e.g. 4")
    num_hidden_layers: Count | None = Field(default=None, description="Decoder layers, e.g. 2")


class TargetSection(Section):
    """Target size of the pruned model; exactly one key is given."""

    shape: ShapeSection | None = Field(
        default=None, description='Sizes of the pruned model, e.g. {"hidden_size": 128, "intermediate_size": 256}'
    )
    parameters: Count | None = Field(
        default=None, description="Largest number of parameters, e.g. 1e6; a tied embedding counts once"
    )
    bytes: Count | None = Field(default=None, description="Largest size of the weights in bytes, in dtype, e.g. 2e6")
    latency: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Largest time of a forward pass over data.batch_size windows, as a share of the original's, both"
        " measured on this machine, e.g. 0.5",
    )


class ImportanceSection(Section):
    """Rules by which parts are cut first."""

    metric: Literal["mean_abs", "second_moment"] = Field(
        default="mean_abs",
        description="Importance of channels and heads: mean_abs (mean magnitude of their activations over the"
        " calibration tokens) or second_moment (mean square)",
    )
    depth: Literal["block_influence", "loss"] = Field(
        default="block_influence",
        description="Importance of layers: block_influence (1 - cosine of a layer's input and output) or loss (how much"
        " the loss of the calibration tokens rises without the layer; a pass for each layer)",
    )
    tp: Count = Field(
        default=1, description="Tensor-parallel size: processes of the launcher that share each layer, e.g. 4"
    )
    pp: Count = Field(
        default=1, description="Pipeline-parallel size: processes of the launcher that share the layers out, e.g. 2"
    )
    cp: Count = Field(
        default=1, description="Context-parallel size: processes of the launcher that share each window, e.g. 2"
    )
    cp_method: Literal["ulysses", "ring"] = Field(
        default="ulysses", description="Attention across the processes that share a window: ulysses or ring"
    )
    zero_stage: Literal[0, 3] = Field(
        default=0,
        description="3: weights are sharded over the processes with different tokens (FSDP2, or ZeRO-3 with engine"
        " deepspeed), and gathered layer by layer; 0: each of them has its own copy",
    )
    engine: Literal["torch", "deepspeed"] = Field(
        default="torch", description="What runs the layout: torch (FSDP2, DTensor, torch's pipelines) or deepspeed"
    )


class PruneConfig(Section):
    """Structured pruning: FFN channels, attention heads, residual channels, experts and layers are cut out."""

    model: PathOrUrl = Field(
        description="Hugging Face folder of the floating-point model to prune, or its URL, e.g. out/demo/models/teacher"
    )
    output: PathOrUrl = Field(
        description="Directory of the pruned model, or its URL, e.g. out/demo/models/pruned; it must not exist yet"
    )
    target: TargetSection = Field(
        default_factory=TargetSection,
        description='How small the result has to be, e.g. {"parameters": 1e6}',
    )
    axes: list[AxisName] | None = Field(
        default=None,
        description='Sizes that may be cut to reach parameters, bytes or latency, e.g. ["intermediate_size",'
        ' "num_hidden_layers"]; null: hidden_size, intermediate_size (and moe_intermediate_size) and'
        " num_key_value_heads, as far as the architecture has them",
    )
    multiple_of: Count = Field(
        default=32, description="Residual and FFN channels stay multiples of this, e.g. 64, or as they are"
    )
    importance: ImportanceSection = Field(default_factory=ImportanceSection, description="What is cut first")
    calibration: CalibrationSection = Field(
        default_factory=CalibrationSection, description="Text that the importance is measured on"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="dtype of the written weights: bfloat16, float16 or float32; null: the model's own"
    )
    consumers: list[str] | None = Field(
        default=None,
        description='Programs that have to score the result before it gets its name, e.g. ["transformers", "vllm"];'
        " null: every one that is installed and takes it",
    )
    data: HeldOutData = Field(description="Held-out data on which the model is evaluated before and after pruning")
