"""Trains a family in every column of the sweep on two ranks, each compared with one process (`layout_rank`)."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from pipeline.models.hf_config import one_line
from pipeline.models.routers import has_experts
from tests import warm
from tests.engines.layout_cells import MASKED, Keys, at, merged, optimizer
from tests.engines.layout_worker import MODEL
from tests.sweeps.families import tiny_fields
from tests.sweeps.layout_rank import ENDED, SAMPLES, STARTED

SECONDS = 150
"""Limit of a check, of a reference and of a layout, each."""


def _layout(stage: int, *parts: Keys, **parallel: Any) -> Keys:
    own = parts if MUON in parts else (ADAMW, *parts)
    return {"train_batch_size": SAMPLES, **at(stage, *own, **parallel)[1]}


DEEPSPEED = {"engine": "deepspeed"}
PACKED = merged(MASKED, {"data": {"packing": "best_fit"}, "train_micro_batch_size_per_gpu": 2})
# Adam's usual eps of 1e-8 turns rounding errors of gradients near zero into updates of full size: with it, and lr 3e-3,
# the norms of Gemma 4 differ by 5e-3 between any two orders of summation
ADAMW, MUON = optimizer("AdamW", lr=1e-3, betas=[0.0, 0.95], eps=1e-3), optimizer("Muon", lr=3e-3, adam_lr=2e-3)

COLUMNS: dict[str, Keys] = {
    "dp": _layout(3),
    "tp": _layout(3, tp=2),
    "pp": _layout(2, pp=2),
    "cp ring": _layout(3, cp=2, cp_method="ring"),
    "Ulysses": _layout(3, cp=2, cp_method="ulysses"),
    "masks": _layout(3, MASKED),
    "packing": _layout(3, PACKED),
    "Muon": _layout(3, MUON),
    "ep": _layout(3, ep=2),
    "aux": _layout(3, {"moe": {"balance": "aux_loss", "aux_loss_coef": 0.5}}),
    "bias": _layout(3, {"moe": {"balance": "bias", "bias_update_rate": 0.02}}),
}
"""Column -> config keys of its layout, on two ranks of engine torch."""
IDS = {"bos_token_id": 500, "eos_token_id": 501, "pad_token_id": 502}
"""Of a dataset's tokenizer; they do not occur."""
OF_EXPERTS = ("ep", "aux", "bias")

NAMED: dict[str, Keys] = {
    "FSDP2, tp 2": _layout(3, tp=2),
    "FSDP2, pp 2": _layout(3, pp=2),
    "FSDP2, cp 2 with masks": _layout(3, MASKED, cp=2),
    "FSDP2": _layout(3),
    "ZeRO-3, tp 2": _layout(3, DEEPSPEED, tp=2),
    "ZeRO-1, pp 2": _layout(1, DEEPSPEED, pp=2),
    "ZeRO-3, cp 2 with masks": _layout(3, DEEPSPEED, MASKED, cp=2),
    "ZeRO-3": _layout(3, DEEPSPEED),
}
"""Further layouts, of families that are named in the tests; DeepSpeed has no pipeline with ZeRO-3."""


def run_layouts(kind: str, layouts: Mapping[str, Keys] | None = None) -> dict[str, str]:
    """Column -> outcome: "equal, ATTENTION", "refused: WHY", "differs: QUANTITY" or "failed: EXCEPTION".

    A family without a valid tiny config has one column, "all".

    A column whose ranks do not end is failed, and the others are run again without it.

    Args:
        kind: `model_type`.
        layouts: config keys by name; None for `COLUMNS`, without those of experts where it has none.
    """
    fields = IDS | tiny_fields(kind)
    if layouts is None:
        try:
            experts = has_experts(AutoConfig.for_model(**fields).to_dict())
        except Exception as error:  # each config class has its own checks
            return {"all": f"refused: transformers refuses its tiny config: {one_line(error)}"}
        layouts = {name: keys for name, keys in COLUMNS.items() if experts or name not in OF_EXPERTS}
    model = {"model": dict.fromkeys(MODEL) | fields}  # null takes a key of the usual model away
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-layouts-") as folder:
        while left := {name: keys | model for name, keys in layouts.items() if name not in found}:
            found |= _launched(left, Path(folder))
    return {name: found[name] for name in layouts}


def _launched(cases: Mapping[str, Keys], work: Path) -> dict[str, str]:
    """The outcomes of one launch, of one case at least."""
    file = work / "cases.json"
    file.write_text(json.dumps({**cases, "seconds": SECONDS}))
    command = ("-m", "tests.sweeps.layout_rank", file, work)
    try:
        output = warm.run(*command, processes=2, merged=True, timeout_s=60.0 + SECONDS * len(cases)).stdout
    except subprocess.TimeoutExpired as late:
        output = str(late.output)
    found: dict[str, str] = {}
    for rank in sorted(work.glob("outcomes-*.jsonl")):
        rows = [json.loads(line) for line in rank.read_text().splitlines()]
        rank.unlink()
        if rows and rows[-1][1] == STARTED:
            rows.append([rows[-1][0], f"failed: a rank has not ended: {output.strip().splitlines()[-1][:200]}"])
        for column, outcome in rows:
            if outcome not in (STARTED, ENDED) and _severity(outcome) > _severity(found.get(column, "")):
                found[column] = outcome
    assert found, output[-4000:]
    return found


def _severity(outcome: str) -> int:
    """Which rank's outcome is the column's: one that lost the other rank has not failed by itself."""
    order = ("", "equal", "refused", "differs", "failed")
    return 2 if "gloo/transport" in outcome else order.index(outcome.replace(",", ":").partition(":")[0])
