"""fp8 products, emulated on the CPU: every layout follows the reference, one process that multiplies in fp8, too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.comparison import EXPERTS, assert_within_tolerance, differences_fixture, layout, layout_params

pytest.importorskip("torchao", reason="fp8 needs torchao (extra fp8)")

AOT = {"compile": {"enabled": True, "backend": "aot_eager"}}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
"""Halved by tp they are multiples of 16 or of 32."""

BF16 = {"enabled": True}

CALM = {"params": {"lr": 1e-3, "betas": [0.0, 0.95], "weight_decay": 0.1}}
"""At 3e-3 the curves of layouts that round to fp8 otherwise part: ZeRO-1 with tp 2 by 2.3e-3 in the held-out loss."""


def fp8(
    stage: int, recipe: str, *, memory: str = "none", gather: bool = False, experts: bool = False, **keys: Any
) -> dict[str, Any]:
    return {
        **layout(stage, bf16=BF16, model={**SIZES, **(EXPERTS if experts else {})}, optimizer=CALM, **keys),
        "fp8": {"enabled": True, "recipe": recipe, "emulate": True, "fsdp_all_gather": gather},
        "memory": {"activation_checkpointing": memory},
    }


NATIVE = {
    "dp 2, bf16, tensorwise": fp8(3, "tensorwise"),
    "dp 2, bf16, rowwise, selective, compiled": fp8(2, "rowwise", memory="selective", **AOT),
    "dp 2, bf16, rowwise, selective": fp8(3, "rowwise", memory="selective"),
    "dp 2, bf16, mxfp8, full, compiled": fp8(3, "mxfp8", memory="full", **AOT),
    "tp 2, bf16, tensorwise, full, compiled": fp8(3, "tensorwise", memory="full", parallel={"tp": 2}, **AOT),
    "dp 2, bf16, tensorwise, gathered": fp8(3, "tensorwise", gather=True),
    "dp 2, bf16, tensorwise, gathered once, full, compiled": fp8(2, "tensorwise", gather=True, memory="full", **AOT),
    "tp 2, bf16, mxfp8": fp8(0, "mxfp8", parallel={"tp": 2}),
    "cp 2, bf16, rowwise_with_gw_hp": fp8(2, "rowwise_with_gw_hp", parallel={"cp": 2}),
    "ep 2, bf16, rowwise, experts": fp8(3, "rowwise", experts=True, parallel={"ep": 2}),
    "dp 2, bf16, tensorwise, experts, selective": fp8(3, "tensorwise", memory="selective", experts=True),
    "dp 2, bf16, rowwise, experts, full, compiled": fp8(2, "rowwise", memory="full", experts=True, **AOT),
    "pp 2, bf16, tensorwise": fp8(2, "tensorwise", parallel={"pp": 2, "schedule": "zero_bubble"}),
}
DEEPSPEED = {
    "ZeRO-0, bf16, rowwise": fp8(0, "rowwise"),
    "ZeRO-1, tp 2, bf16, tensorwise": fp8(1, "tensorwise", parallel={"tp": 2}),
    "ZeRO-2, bf16, mxfp8": fp8(2, "mxfp8"),
    "ZeRO-3, bf16, tensorwise": fp8(3, "tensorwise"),
    "ZeRO-3, bf16, rowwise, full, compiled": fp8(3, "rowwise", memory="full", **AOT),
    "ZeRO-3, bf16, rowwise, experts": fp8(3, "rowwise", experts=True),
    "ZeRO-1, ep 2, bf16, tensorwise, experts": fp8(1, "tensorwise", experts=True, parallel={"ep": 2}),
    "ZeRO-1, pp 2, bf16, rowwise_with_gw_hp": fp8(1, "rowwise_with_gw_hp", parallel={"pp": 2}),
}
FOUR = {
    "tp 2, ep 2, bf16, rowwise, experts": fp8(3, "rowwise", experts=True, parallel={"tp": 2, "ep": 2}),
    "dp 2, tp 2, bf16, tensorwise, gathered": fp8(3, "tensorwise", gather=True, parallel={"tp": 2}),
    "hybrid, bf16, tensorwise, gathered": fp8(3, "tensorwise", gather=True, parallel={"hybrid_shard_size": 2}),
}


IN_CI = {
    "dp 2, bf16, rowwise, selective, compiled",
    "dp 2, bf16, tensorwise, gathered once, full, compiled",
    "tp 2, bf16, mxfp8",
    "cp 2, bf16, rowwise_with_gw_hp",
    "pp 2, bf16, tensorwise",
    "ZeRO-3, bf16, rowwise, full, compiled",
    "ZeRO-3, bf16, rowwise, experts",
    "ZeRO-1, tp 2, bf16, tensorwise",
    "ZeRO-1, pp 2, bf16, rowwise_with_gw_hp",
    "hybrid, bf16, tensorwise, gathered",
}
"""Every recipe and every kind of layout; the others run with `make sweep-tests`."""

found = differences_fixture(
    "test_a_layout_in_fp8_trains_as_the_reference", {"torch": {2: NATIVE, 4: FOUR}, "deepspeed": {2: DEEPSPEED}}
)


@pytest.mark.parametrize(
    "name",
    layout_params(
        {"dp 2, bf16, tensorwise", "ep 2, bf16, rowwise, experts"},
        NATIVE,
        FOUR,
        DEEPSPEED,
        integration=IN_CI,
    ),
)
def test_a_layout_in_fp8_trains_as_the_reference(name: str, found: dict[str, dict[str, float]]) -> None:
    assert_within_tolerance(found[name], name)
    # of one tensor, the largest; a gradient in bf16 differs from one in fp8 by more than 1e-2 over all tensors. Other
    # roundings to fp8: shards of a tensor have scales of their own under tp; what is gathered is fp32 before, not bf16
    rounds_otherwise = "tp 2" in name or "gathered" in name
    assert found[name]["gradient"] < (0.2 if rounds_otherwise else 5e-3)
