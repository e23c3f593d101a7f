"""ZeRO-3 at real widths, where a recomputation gathers weights that the forward pass still had."""

from __future__ import annotations

import pytest

from pipeline.plan.fake_gpu.case import StepCase, case_process


@pytest.mark.integration
@pytest.mark.sweep
def test_a_selective_recomputation_gathers_weights() -> None:
    layers = ("model.config.num_hidden_layers=4", "train_batch_size=16", "memory.activation_checkpointing=selective")
    zero3 = ("engine=deepspeed", "zero_optimization.stage=3")
    case = StepCase("ds_configs/llama_8b_8gpu.json", 8, overrides=(*layers, *zero3), steps=2)
    with case_process() as result_of:
        assert "error" not in result_of(case)
