"""Laws 3 and 4 with SGD, Lion and Muon: layouts of both engines match one process, and states are exchanged with it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.comparison import (
    EXPERTS,
    FP32,
    LATENT,
    assert_within_tolerance,
    differences_fixture,
    layout,
    layout_params,
)

SMALL = {"stage3_param_persistence_threshold": 0, "sub_group_size": 4096, "reduce_bucket_size": 4096}
SGD = {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}}
PLAIN_SGD = {"type": "SGD", "params": {"lr": 0.3, "weight_decay": 0.1}}
LION = {"type": "Lion", "params": {"lr": 3e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}}
MUON = {"type": "Muon", "params": {"lr": 3e-3, "adam_lr": 2e-3, "weight_decay": 0.1}}
CLIPPED, CLIPPED_LOW = ({**MUON, "params": {**MUON["params"], "qk_clip": each}} for each in (0.05, 0.002))
# QK-Clip changes two matrices after Muon's step: such a layout says of Muon what the same one without it would
# the worker's rate grows with the step: at those above, the curve of 20 steps is chaotic, and rounding becomes 1.4e-4
CALM_SGD, CALM_LION = ({**each, "params": {**each["params"], "lr": lr}} for each, lr in ((SGD, 0.03), (LION, 1e-3)))
# in 4 steps a decay rate of Lion's momentum that is wrong by 0.01 changes the loss by 6e-6 only: some run for 20
BF16, COMPILED = {"bf16": {"enabled": True}}, {"compile": {"enabled": True, "backend": "aot_eager"}}
BIASES = {"attention_bias": True}

LAYOUTS: dict[str, dict[str, Any]] = {
    "deepspeed": {
        "sgd, stage 0, clipped": layout(0, optimizer=SGD, gradient_clipping=0.1),
        "sgd, stage 1": layout(1, optimizer=CALM_SGD, steps=20),
        "sgd, stage 3": layout(3, zero=SMALL, optimizer=SGD),
        "sgd, stage 1, bf16": layout(1, optimizer=SGD, **BF16),
        "sgd without momentum, stage 3": layout(3, zero=SMALL, optimizer=PLAIN_SGD),
        "sgd, tp 2, DeepSpeed": layout(1, optimizer=SGD, parallel={"tp": 2}),
        "sgd, stage 2, optimizer on the cpu": layout(2, zero={"offload_optimizer": {"device": "cpu"}}, optimizer=SGD),
        "lion, stage 0": layout(0, optimizer=LION),
        "lion, stage 1": layout(1, optimizer=CALM_LION, steps=20),
        "lion, stage 3, clipped": layout(3, zero=SMALL, optimizer=LION, gradient_clipping=0.1),
        "lion, stage 1, bf16": layout(1, optimizer=LION, **BF16),
        "lion, tp 2, DeepSpeed": layout(3, zero=SMALL, optimizer=LION, parallel={"tp": 2}),
        "lion, pp 2, DeepSpeed": layout(1, optimizer=LION, parallel={"pp": 2}),
        "qk_clip, stage 0": layout(0, optimizer=CLIPPED, model=BIASES),
        "qk_clip, stage 1, bf16": layout(1, optimizer=CLIPPED, **BF16),
        "qk_clip, stage 2": layout(2, optimizer=CLIPPED, model=BIASES),
        "qk_clip, stage 3": layout(3, zero=SMALL, optimizer=CLIPPED, model=BIASES),
        "qk_clip, tp 2, DeepSpeed": layout(3, zero=SMALL, optimizer=CLIPPED, parallel={"tp": 2}),
        "qk_clip, pp 2, DeepSpeed": layout(1, optimizer=CLIPPED, parallel={"pp": 2}),
        "qk_clip, ulysses": layout(1, optimizer=CLIPPED, parallel={"cp": 2, "cp_method": "ulysses"}),
    },
    "torch": {
        "sgd, unsharded": layout(0, optimizer=SGD),
        "sgd, fsdp2": layout(3, optimizer=SGD, gradient_clipping=0.1),
        "sgd without momentum, fsdp2": layout(3, optimizer=PLAIN_SGD),
        "sgd, tp 2": layout(2, optimizer=SGD, parallel={"tp": 2}),
        "lion, fsdp2": layout(3, optimizer=CALM_LION, steps=20),
        "lion, fsdp2, bf16": layout(3, optimizer=LION, **BF16),
        "lion, tp 2": layout(2, optimizer=LION, parallel={"tp": 2}),
        "lion, pp 2": layout(2, optimizer=LION, parallel={"pp": 2}),
        "muon, fsdp2, experts": layout(3, optimizer=MUON, model=EXPERTS),
        "qk_clip, unsharded": layout(0, optimizer=CLIPPED, model=BIASES),
        "qk_clip, fsdp2": layout(3, optimizer=CLIPPED, model=BIASES),
        "qk_clip, fsdp2, bf16": layout(3, optimizer=CLIPPED, **BF16),
        "qk_clip, ep 2, latent": layout(2, optimizer=CLIPPED_LOW, model=LATENT, parallel={"ep": 2}),
        "qk_clip, tp 2": layout(2, optimizer=CLIPPED, model=BIASES, parallel={"tp": 2}),
        "qk_clip, pp 2": layout(2, optimizer=CLIPPED, parallel={"pp": 2}),
        "qk_clip, ring, compiled": layout(3, optimizer=CLIPPED, parallel={"cp": 2, "cp_method": "ring"}, **COMPILED),
        "qk_clip, ulysses, one key head, recomputed": layout(
            3,
            optimizer=CLIPPED,
            model={"num_key_value_heads": 1},
            parallel={"cp": 2, "cp_method": "ulysses"},
            memory={"activation_checkpointing": "selective"},
        ),
    },
}
INTEGRATION = {
    "lion, stage 3, clipped",
    "muon, fsdp2, experts",
    "qk_clip, stage 3",
    "qk_clip, ep 2, latent",
}
"""Every optimizer; Muon with QK-Clip and tp: tests/parity. Others: the sweep."""

found = differences_fixture(
    "test_a_layout_follows_one_process_and_exchanges_its_state_with_it",
    {engine: {2: layouts} for engine, layouts in LAYOUTS.items()},
)


@pytest.mark.parametrize("name", layout_params(set(), *LAYOUTS.values(), integration=INTEGRATION))
def test_a_layout_follows_one_process_and_exchanges_its_state_with_it(
    name: str, found: dict[str, dict[str, float]]
) -> None:
    differences = found[name]
    assert_within_tolerance(differences, name)
    if "qk_clip" in name:
        assert differences["clipped"] > 0
        assert differences["logits"] < (2**-6 if "bf16" in name else FP32)  # bf16: two roundings
