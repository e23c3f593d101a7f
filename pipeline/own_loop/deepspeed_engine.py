"""Custom training loops on DeepSpeed: ZeRO stages 0 to 3.

With bf16 or fp16 the model's weights are in that dtype and the optimizer has fp32 master weights. There ZeRO 0 would
have no fp32 master weights: ZeRO 1 is used instead, with the same loss curve in less memory.
"""

from __future__ import annotations

import math
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from foundation.errors import CheckpointError, ConfigError
from pipeline.engines.common import raise_if_non_finite
from pipeline.engines.deepspeed import state as held
from pipeline.engines.deepspeed.operators import set_up_deepspeed
from pipeline.engines.deepspeed.optimizer import with_update_gate
from pipeline.engines.parallel.conditional_modules import blocks_of_lists, complete_gradients
from pipeline.own_loop.batches import in_dtype
from pipeline.own_loop.engine import LoopEngine, Parts, at_rate_zero
from pipeline.own_loop.state import StateEntry

_NEVER = 1 << 62


class DeepSpeedLoop(LoopEngine):
    """A `LoopEngine` on engine deepspeed. The process group has to be initialized already.

    Args:
        parts: model, optimizer, config and batch sizes.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        config = parts.config
        if config.fp16.enabled and not get_accelerator().is_fp16_supported():
            why = f"DeepSpeed does not support it on this {get_accelerator().device_name()}"
            raise ConfigError("fp16.enabled", True, why=why, remedy="use bf16, or engine torch")
        half = config.bf16.enabled or config.fp16.enabled
        self._dtype = torch.float32
        if half:
            self._dtype = torch.bfloat16 if config.bf16.enabled else torch.float16
        self._stage = max(config.zero_optimization.stage, 1) if half else config.zero_optimization.stage
        statistics = _statistics(parts.model)
        self._finite = True
        if self._stage == 0:  # at other stages DeepSpeed itself skips non-finite updates
            with_update_gate(parts.optimizer, lambda: self._finite)
        set_up_deepspeed()
        if self._stage < 3:
            complete_gradients(parts.model)
        else:
            for block in blocks_of_lists(parts.model):
                set_z3_leaf_module(block, True)
        self._engine: Any
        with at_rate_zero(parts.optimizer):
            made = _deepspeed_config(parts, self._stage)
            self._engine, *_ = deepspeed.initialize(model=parts.model, optimizer=parts.optimizer, config=made)
            parts.optimizer.state.clear()  # the dummy step's count would change the bias correction of the first one
        for group, peak in zip(self._groups(), self._peaks, strict=True):
            group["lr"] = peak
        for module, buffers in statistics:
            module._buffers.update(buffers)  # DeepSpeed casts buffers to half precision

    def _root(self) -> Any:
        return self._engine

    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._engine.optimizer.param_groups
        return groups

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._dtype != torch.float32:
            args, kwargs = in_dtype(args, self._dtype), in_dtype(kwargs, self._dtype)
        return self._engine(*args, **kwargs)

    def _backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def _step(self, ends: bool) -> None:
        # stage 0 in fp32: DeepSpeed computes the norm only for clipping
        reported = self._norm() if ends and self._stage == 0 else None
        self._finite = reported is None or math.isfinite(reported)
        self._engine.step()
        if not ends:
            return
        if self._stage > 0:
            reported = self._engine.get_global_grad_norm()
        # -1 and None: the update was skipped
        self.grad_norm = math.inf if reported is None or float(reported) < 0 else float(reported)
        if not self._parts.config.fp16.enabled:
            raise_if_non_finite(self.steps + 1, "gradient norm", self.grad_norm)

    def _norm(self) -> float:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def _state_entries(self) -> list[StateEntry]:
        named = dict(self.module.named_parameters())
        base = self._parts.optimizer
        if self._stage == 0:
            return [StateEntry(n, tuple(p.shape), 0, p, 0, p.numel(), base.state[p]) for n, p in named.items()]
        frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
        if frozen:
            raise CheckpointError(
                f"DeepSpeed has no fp32 master weights of frozen parameters, such as {frozen[0]}\n"
                f"  try: zero_optimization.stage 0 in fp32, or engine torch"
            )
        shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in named.items()}
        flats, found = held.flat_tensors(self._engine.optimizer), held.flat_slices(self._engine.optimizer, named)
        return [
            StateEntry(s.name, shapes[s.name], s.start, flats[s.flat], s.offset, s.length, base.state[flats[s.flat]])
            for s in found
        ]

    def _after_load(self) -> None:
        zero = self._engine.optimizer
        if self._stage == 3:
            for number in range(len(held.flat_tensors(zero))):
                zero._reassign_or_swap_out_partitioned_parameters(number)
        if self._stage > 0:
            held.refresh_model_weights(zero)

    def _loss_scale(self) -> list[float]:
        scaler = self._scaler()
        if scaler is None:
            return [1.0, 0.0, 0.0]
        return [scaler.cur_scale, scaler.cur_iter - scaler.last_overflow_iter - 1, scaler.cur_hysteresis]

    def _set_loss_scale(self, state: list[float]) -> None:
        scaler = self._scaler()
        if scaler is not None:
            scaler.cur_scale, scaler.cur_hysteresis = state[0], int(state[2])
            scaler.cur_iter, scaler.last_overflow_iter = int(state[1]), -1

    def _scaler(self) -> Any:
        """DeepSpeed's dynamic loss scaler, or None."""
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        return scaler if self._parts.config.fp16.enabled and hasattr(scaler, "cur_iter") else None


def _statistics(model: nn.Module) -> list[tuple[nn.Module, dict[str, Tensor | None]]]:
    """Every BatchNorm module with its running statistics."""
    return [(m, dict(m._buffers)) for m in model.modules() if isinstance(m, _BatchNorm)]


def _deepspeed_config(parts: Parts, stage: int) -> dict[str, Any]:
    config, share = parts.config, parts.share
    zero = config.zero_optimization.model_dump(exclude_none=True)
    for key in ("offload_optimizer", "offload_param"):
        if zero[key]["device"] == "none":
            del zero[key]
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": share.micro,
        "gradient_accumulation_steps": share.accumulation,
        "gradient_clipping": config.gradient_clipping,
        "zero_optimization": {**zero, "stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": config.wall_clock_breakdown,
        "steps_per_print": config.steps_per_print or _NEVER,
    }
    if config.bf16.enabled:
        made |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        made["communication_data_type"] = "fp32"
    if config.fp16.enabled:
        made |= {"fp16": config.fp16.model_dump(), "communication_data_type": "fp32"}
    return made
