"""Sizes of the buffers that DeepSpeed's ZeRO (0.19.8, `deepspeed/runtime`) allocates on a rank.

`memory` sums them at moments of a step. s is the bytes per element in forward and backward passes.

- Stage 1 in bf16 with fp32 accumulation uses `bf16_optimizer.BF16_Optimizer`, which has no bucket. It permanently has
  an fp32 gradient of all elements; from the first backward pass of a step to the step's end, also all bf16 gradients.
  After the last backward pass it reduces through flat copies of 5e8 elements.
- Other runs at stage 1, and stage 2, use `zero.stage_1_and_2`. The first gradient of a backward pass allocates a bucket
  of the whole `reduce_bucket_size` (two with `overlap_comm`), in the model's dtype, or at stage 1 in the dtype of
  accumulation. A pipeline allocates another one, in the dtype of communication, to reduce after all backward passes.
- Stage 3 (`zero.stage3`) permanently has one bucket, in the dtype of communication.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.parallel.rank_model import RankModel, Widths

_FP32 = 4
_DEFAULT_BUCKET, _DEFAULT_PREFETCH, _DEFAULT_LIVE, _DEFAULT_PERSISTENT = 5e8, 5e7, 1e9, 1e5
"""DeepSpeed's defaults of `reduce_bucket_size` and the `stage3_` settings, in elements."""


@dataclass(frozen=True)
class ZeroSizes:
    """Bytes of a rank at stages 1 to 3.

    Attributes:
        run: the resolved config.
        rank: sizes of the rank's part of the model.
        widths: sizes of a decoder layer.
        size: bytes per element in forward and backward passes (s).
        held: number of elements whose optimizer states the rank has.
        states: bytes per parameter of optimizer states.
    """

    run: ResolvedRun
    rank: RankModel
    widths: Widths
    size: int
    held: float
    states: float

    @property
    def stage(self) -> int:
        """ZeRO stage, 1 to 3."""
        return self.run.config.zero_optimization.stage

    @property
    def offloaded(self) -> bool:
        """Whether master weights and moments are not on the device."""
        return self.run.config.zero_optimization.offload_optimizer.device != "none"

    @property
    def accumulated(self) -> int:
        """Bytes per element of accumulated gradients."""
        config = self.run.config
        return self.size if config.data_types.grad_accum_dtype == "bf16" else _FP32

    @property
    def unbucketed(self) -> bool:
        """Whether the optimizer is DeepSpeed's BF16_Optimizer."""
        return self.stage == 1 and self.run.config.bf16.enabled and self.accumulated == _FP32 and not self.offloaded

    @property
    def weights(self) -> float:
        """Bytes of weights and their masters between steps."""
        elements = self.rank.parameters
        masters = 0.0 if self.offloaded else _FP32 * self.held
        if self.stage < 3:
            return self.size * elements + masters
        on_host = self.run.config.zero_optimization.offload_param.device != "none"
        return (0.0 if on_host else self.size * self.held) + masters

    @property
    def optimizer(self) -> float:
        """Bytes of optimizer states."""
        return 0.0 if self.offloaded else self.states * self.held

    @property
    def gradients(self) -> float:
        """Bytes of accumulated gradients."""
        if self.stage == 1:
            return float(self.accumulated * self.rank.parameters)
        if self.offloaded:
            return 0.0
        return self.accumulated * self.held

    @property
    def bucket_elements(self) -> float:
        """Elements of a bucket (`reduce_bucket_size`)."""
        size = self.run.config.zero_optimization.reduce_bucket_size
        return float(_DEFAULT_BUCKET if size is None else size)

    @property
    def communicated(self) -> int:
        """Bytes per element in a reduction."""
        return 2 if self.run.config.communication_data_type == "bf16" else _FP32

    @property
    def bucket(self) -> float:
        """Bytes of gradient buckets during backward passes."""
        if self.unbucketed:
            return 0.0
        if self.stage == 3:
            return self.bucket_elements * self.communicated
        width = self.accumulated if self.stage == 1 else self.size
        double = bool(self.run.config.zero_optimization.overlap_comm) and self.run.topology.pp == 1
        return self.bucket_elements * width * (2 if double else 1)

    @property
    def reduced(self) -> float:
        """Bytes that a reduction allocates: flat copies of a full bucket; with the BF16_Optimizer, of 5e8 elements."""
        if self.unbucketed:
            casts = self.communicated if self.communicated != _FP32 else 0
            return min(self.rank.parameters, _DEFAULT_BUCKET) * (_FP32 + casts)
        elements = min(self.rank.parameters, self.bucket_elements)
        if self.stage == 3:
            return elements * self.communicated
        cast = self.communicated if self.communicated != self.size else 0
        second = self.bucket_elements * self.communicated if self.run.topology.pp > 1 else 0.0
        return elements * (self.size + cast) + second

    @property
    def reduced_share(self) -> float:
        """Share of the layers whose backward passes fill a bucket; 1 if the reduction waits for all layers."""
        if self.stage == 1:
            return 1.0
        return min(1.0, self.bucket_elements / max(1, self.rank.parameters))

    @property
    def persistent(self) -> float:
        """Elements that stage 3 keeps whole: parameters smaller than `stage3_param_persistence_threshold`."""
        threshold = self.run.config.zero_optimization.stage3_param_persistence_threshold
        limit = _DEFAULT_PERSISTENT if threshold is None else threshold
        w, tp = self.widths, self.run.topology.tp
        matrices = [w.hidden * w.query // tp] * 2 + [w.hidden * w.key_value // tp] * 2 + [w.hidden] * 2
        if not w.experts:
            matrices += [w.hidden * w.intermediate // tp] * 3
        kept = sum(each for each in matrices if each < limit) * len(self.rank.layers)
        return float(kept + sum(each for each in (self.rank.rest,) if each < limit))

    @property
    def gathered(self) -> float:
        """Bytes of weights that stage 3 has whole between the forward and the backward pass.

        A parameter that is used again within `stage3_max_reuse_distance` elements is not released, and others are
        gathered in advance up to `stage3_max_live_parameters`. At least one layer, or embedding or head, is gathered.
        """
        live = self.run.config.zero_optimization.stage3_max_live_parameters
        apart = self.rank.head if self.rank.separate else self.rank.rest
        least = max(*self.rank.layers, apart) + self.persistent
        return self.size * min(self.rank.parameters, max(least, _DEFAULT_LIVE if live is None else live))

    @property
    def prefetched(self) -> float:
        """Bytes of the flat buffer of weights gathered in advance, from which they are copied one by one."""
        size = self.run.config.zero_optimization.stage3_prefetch_bucket_size
        limit = _DEFAULT_PREFETCH if size is None else size
        return self.size * min(self.rank.parameters - self.persistent, limit)

    @property
    def secondary(self) -> float:
        """Bytes of the secondary shards of `zero_hpz_partition_size`."""
        node = self.run.config.zero_optimization.zero_hpz_partition_size
        return self.size * self.rank.parameters / node if node else 0.0

    @property
    def host(self) -> float:
        """Bytes of host memory: offloaded masters, moments, two fp32 gradients, and shards of the weights.

        They are in `fp32_partitioned_groups_flat` with `grad`, and `grad_partitions_flat_buffer`. The latter has the
        sums of gradients over micro-batches, and is in host memory even if the optimizer is on NVMe.
        """
        section = self.run.config.zero_optimization
        elements = {"cpu": 3 * _FP32 + self.states, "nvme": float(self.accumulated)}
        optimizer = elements.get(section.offload_optimizer.device, 0.0) * self.held
        return optimizer + (self.size * self.held if section.offload_param.device == "cpu" else 0.0)
