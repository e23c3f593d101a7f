"""Where a stage begins in its sources: a pure function of the config, without gaps and repeats where it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from foundation.section import parse
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config
from pipeline.data.mixture import DataMixture
from pipeline.data.stage_mixtures import open_mixtures
from tests.conftest import tiny_config


def opened(tokens: Path, *stages: dict[str, Any]) -> tuple[ResolvedRun, list[DataMixture]]:
    config = tiny_config(tokens, tokens / "none", engine="torch", scheduler=None, stages=list(stages))
    run = resolve(parse(Config, config), world_size=1)
    return run, open_mixtures(run)


def windows_of(run: ResolvedRun, mixtures: list[DataMixture], stage: int) -> list[int]:
    accounts = run.accounts
    first, last = accounts.first_step(stage), accounts.last_step(stage)
    samples = np.arange(accounts.samples(first - 1), accounts.samples(last))
    return mixtures[stage].order.locate(samples).window.tolist()


def test_a_stage_goes_on_in_its_sources_over_stages_of_another_length(tokens: Path) -> None:
    stages = [
        {"name": "a", "until": {"steps": 4}, "train_batch_size": {"from": 2, "to": 8, "over_tokens": 200}},
        {"name": "b", "until": {"steps": 8}, "train_batch_size": 4},
        {"name": "c", "until": {"steps": 12}, "data": {"sequence_length": 64}},
        {"name": "d", "data": {"sequence_length": 32}},
    ]
    run, mixtures = opened(tokens, *stages)
    trained = [window for stage in (0, 1, 3) for window in windows_of(run, mixtures, stage)]
    plain = mixtures[0].order.locate(np.arange(len(trained))).window.tolist()
    assert trained == plain  # as one order that no stage interrupts
    assert mixtures[2].order.start.drawn == (0,)
    assert mixtures[2].sources[0].windows < mixtures[0].sources[0].windows
    seen = mixtures[3].order.epochs(len(windows_of(run, mixtures, 3)))
    assert seen == [len(trained) / mixtures[0].sources[0].windows]


def test_a_stage_that_does_not_go_on_is_shuffled_anew(tokens: Path) -> None:
    stages = [{"name": "a", "until": {"steps": 10}}, {"name": "b", "continue_sources": False}]
    run, mixtures = opened(tokens, *stages)
    first, second = (windows_of(run, mixtures, stage) for stage in (0, 1))
    assert first != second
    assert len({*second}) == len(second)
    again = opened(tokens, *stages)
    assert windows_of(*again, 1) == second
