"""The configs of the roofline, and the small steps whose layers are lowered for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from pipeline.plan.fake_gpu.case import StepCase
from tests.config.rules.test_layouts import shipped
from tests.plan.fake_gpu.cells import EXPERTS_GATHERED, GATHERED

SMALL_LAYERS = 2
"""Decoder layers of the steps that are lowered."""

_ON_ENGINE_TORCH = (
    "engine=torch",
    "data_types.grad_accum_dtype=null",
    "zero_optimization.reduce_bucket_size=auto",
    "zero_optimization.stage3_prefetch_bucket_size=auto",
    "zero_optimization.stage3_param_persistence_threshold=auto",
)
_ONE_STAGE = ("parallel.pp=1", "parallel.schedule=1f1b", "parallel.virtual_stages=1")
_FEW_STEPS = ("run.tokens=null", "run.steps=70000")
"""The scheduler's decay needs as many."""


@dataclass(frozen=True)
class Row:
    """A config whose bound is shown.

    Attributes:
        file: in `ds_configs`.
        overrides: config keys that differ from the file.
        small: further keys of the lowered step, which change nothing in a layer: engine deepspeed compiles the same
            layers as engine torch, a stage of a pipeline has the layers of a model without one.
        eager: parts that are not compiled, so their operators are counted: "layers", "loss".
        same_traffic: whether the overrides leave communication as it is.
        variant: key of `cells.VARIANTS` whose fake step communicates the same.
    """

    file: str
    overrides: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    same_traffic: bool = False
    variant: str | None = None

    @cached_property
    def whole(self) -> StepCase:
        """The step at its real size, on the first rank of the pipeline."""
        return StepCase(f"ds_configs/{self.file}", shipped()[self.file], overrides=self.overrides)

    def lowered(self) -> StepCase:
        """A step of one micro-batch and `SMALL_LAYERS` layers."""
        run = self.whole.resolved()
        layers = f"model.config.num_hidden_layers={SMALL_LAYERS}"
        batch = f"train_batch_size={run.batch.samples // run.batch.accumulation}"
        processes = self.whole.processes // run.topology.pp
        return replace(
            self.whole, processes=processes, overrides=(*self.overrides, layers, batch, *self.small, *_FEW_STEPS)
        )

    def stages(self) -> list[StepCase]:
        """The step at its real size on every rank of the pipeline."""
        return [replace(self.whole, pp_rank=rank) for rank in range(self.whole.resolved().topology.pp)]

    def cell(self, pp_rank: int) -> str | None:
        """Name of the committed fake step on a rank of the pipeline; None where the row differs from the config."""
        return None if self.overrides else self._name(pp_rank)

    def traffic_cell(self, pp_rank: int) -> str | None:
        """Name of a committed fake step with the same communication."""
        return self.variant or (self._name(pp_rank) if self.same_traffic else self.cell(pp_rank))

    def _name(self, pp_rank: int) -> str:
        return self.file + (f" pp {pp_rank}" if self.whole.resolved().topology.pp > 1 else "")


_SMALL_MOMENTS = ("memory.activation_checkpointing=selective", "optimizer.params.moments_dtype=bf16")

ROWS = {
    "llama_8b_h200.json, as shipped": Row("llama_8b_h200.json"),
    "llama_8b_h200.json, nothing recomputed": Row("llama_8b_h200.json", ("memory.activation_checkpointing=none",)),
    "llama_8b_h200.json, moments in bf16, selective": Row("llama_8b_h200.json", _SMALL_MOMENTS),
    "the same, 64k tokens a step": Row(
        "llama_8b_h200.json", (*_SMALL_MOMENTS, "train_batch_size=16", "train_micro_batch_size_per_gpu=2")
    ),
    "llama_8b_8gpu.json, as shipped": Row("llama_8b_8gpu.json"),
    "llama_8b_64k_cp.json, as shipped": Row("llama_8b_64k_cp.json"),
    "llama_1b_zero3.json, as shipped": Row("llama_1b_zero3.json", small=_ON_ENGINE_TORCH, eager=("loss",)),
    "llama_70b_zero3.json, as shipped": Row("llama_70b_zero3.json", small=_ON_ENGINE_TORCH),
    "llama_70b_3d.json, as shipped": Row(
        "llama_70b_3d.json", small=(*_ON_ENGINE_TORCH, "zero_optimization.stage=2", *_ONE_STAGE)
    ),
    "llama_70b_fsdp_3d.json, as shipped": Row("llama_70b_fsdp_3d.json", small=_ONE_STAGE),
    GATHERED: Row("qwen3_moe_30b.json", EXPERTS_GATHERED, variant=GATHERED),
    f"{GATHERED}, nothing recomputed": Row(
        "qwen3_moe_30b.json", (*EXPERTS_GATHERED, "memory.activation_checkpointing=none"), variant=GATHERED
    ),
}
"""Name -> row. All shipped configs of real size; those of width 256 are for tests, and their time is that of starting
kernels."""
