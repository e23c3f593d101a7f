"""Law 3 with uneven shares: whatever samples a data-parallel rank takes of a step, losses are those of one process.

Every layout also resumes from the reference's state, and the reference from the layout's: even to uneven and back.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.comparison import EXPERTS, assert_within_tolerance, differences_fixture, layout, layout_params


def shared(stage: int, shares: Any, *, micro: int, **keys: Any) -> dict[str, Any]:
    return layout(stage, micro=micro, parallel={"shares": shares, **keys})


TORCH = {
    2: {
        "DDP [3, 1]": shared(0, [3, 1], micro=1),
        "DDP [3, 1], micro-batches of different size": shared(0, [3, 1], micro=4),
        "DDP, other shares in every step": shared(0, "auto", micro=2),
        "FSDP2 stage 2 [3, 1]": shared(2, [3, 1], micro=4),
        "FSDP2 stage 3 [3, 1]": shared(3, [3, 1], micro=4),
        "FSDP2 stage 3, other shares in every step": shared(3, "auto", micro=4),
        "experts [3, 1]": {**shared(3, [3, 1], micro=4), "model": EXPERTS},
        "bf16 [3, 1]": {**shared(3, [3, 1], micro=4), "bf16": {"enabled": True}},
    },
    3: {
        "DDP [2, 1, 1]": shared(0, [2, 1, 1], micro=2),
        "FSDP2 stage 2 [2, 1, 1]": shared(2, [2, 1, 1], micro=2),
        "FSDP2 stage 3 [2, 1, 1]": shared(3, [2, 1, 1], micro=4),
        "8 samples on 3 ranks, [1, 1, 1]": shared(3, [1, 1, 1], micro=4),
    },
    4: {
        "HSDP 2 x 2 [3, 2, 2, 1]": shared(3, [3, 2, 2, 1], micro=4, hybrid_shard_size=2),
        "dp 2 x tp 2 [3, 1]": shared(3, [3, 1], micro=4, tp=2),
        "dp 2 x cp 2 [3, 1]": shared(2, [3, 1], micro=4, cp=2),
        "dp 2 x cp 2, ring [3, 1]": shared(0, [3, 1], micro=1, cp=2, cp_method="ring"),
        "pp 2 x dp 2 [3, 1]": shared(0, [3, 1], micro=1, pp=2),
        "pp 2 x dp 2, stage 2, other shares in every step": shared(2, "auto", micro=1, pp=2),
        "pp 2 x dp 2, interleaved [3, 1]": shared(2, [3, 1], micro=1, pp=2, schedule="interleaved_1f1b"),
    },
}
DEEPSPEED = {
    2: {
        **{f"ZeRO-{stage} [3, 1]": shared(stage, [3, 1], micro=4) for stage in range(4)},
        "ZeRO-1 [3, 1], whole micro-batches": shared(1, [3, 1], micro=1),
        "ZeRO-1, other shares in every step": shared(1, "auto", micro=2),
        "ZeRO-2, other shares in every step": shared(2, "auto", micro=4),
        "ZeRO-3, other shares in every step": shared(3, "auto", micro=4),
        "ZeRO-2 in fp32 with clipping [3, 1]": {**shared(2, [3, 1], micro=4), "gradient_clipping": 0.1},
    },
    4: {
        "ZeRO-1, dp 2 x tp 2 [3, 1]": shared(1, [3, 1], micro=2, tp=2),
        "pipeline, pp 2 x dp 2 [3, 1]": shared(1, [3, 1], micro=1, pp=2),
        "pipeline, ZeRO-0, other shares in every step": shared(0, "auto", micro=1, pp=2),
    },
}
LAYOUTS = {"torch": TORCH, "deepspeed": DEEPSPEED}
IN_CI = {
    "DDP [3, 1], micro-batches of different size",
    "FSDP2 stage 3, other shares in every step",
    "ZeRO-3 [3, 1]",
    "ZeRO-1, other shares in every step",
    "pipeline, pp 2 x dp 2 [3, 1]",
}
"""The others run with `make sweep-tests`."""

found = differences_fixture("test_losses_with_uneven_shares_are_those_of_one_process", LAYOUTS)


@pytest.mark.parametrize("name", layout_params(set(), *TORCH.values(), *DEEPSPEED.values(), integration=IN_CI))
def test_losses_with_uneven_shares_are_those_of_one_process(found: dict[str, dict[str, float]], name: str) -> None:
    assert_within_tolerance(found[name], name)
