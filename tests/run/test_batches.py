"""The batches of a rank: where an ordinary run's steps and islands' slots are in the order of samples."""

from __future__ import annotations

from pathlib import Path

import torch

from foundation.section import parse
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config
from pipeline.data.skips import Skip, Skips
from pipeline.run.batches import RankBatches
from pipeline.run.prepare import prepare
from tests.conftest import tiny_config


def test_a_slot_is_the_same_data_on_islands_that_have_skipped_some_and_others(tokens: Path, tmp_path: Path) -> None:
    run = resolve(parse(Config, tiny_config(tokens, tmp_path / "run")), world_size=1)
    batches, skips = RankBatches(prepare(run), 0), Skips((Skip(1, 2),))
    behind = next(iter(batches.training(first_step=1, skips=skips)))
    slot = next(iter(batches.slots(3, 3)))
    assert torch.equal(behind.micro_batches[0].input_ids, slot.micro_batches[0].input_ids)
