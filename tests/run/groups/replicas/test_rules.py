"""What is refused beside `replicas`, and that the parts of replicas are the samples of a step in any layout (law 1)."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import ConfigError
from pipeline.config.batch import BatchSizes, part_of_batch
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config
from pipeline.data.step_samples import samples_of_rows
from pipeline.run.groups.replicas.build import digest_of_run, member_at
from pipeline.run.groups.replicas.deal import divide
from tests.conftest import tiny_config


def make(tmp_path: Path, **fields: Any) -> Config:
    section = {"replicas": {"count": 2, "name": "a"}, "engine": "torch", "zero_optimization": {"stage": 0}}
    return Config.model_validate(tiny_config(tmp_path, tmp_path / "run", **{**section, **fields}))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"islands": {"count": 2}}, "remove one of the sections islands and replicas"),
        ({"engine": "deepspeed"}, "use engine torch with replicas"),
        ({"anomalies": {"spikes": "rollback"}}, "at another step than the others"),
        ({"parallel": {"shares": "auto"}}, "replicas divide the samples of a step themselves"),
        ({"moe": {"balance": "bias"}}, "counted over the ranks of one replica"),
        ({"optimizer": {"type": "Muon", "params": {"qk_clip": 100}}}, "and would scale other weights"),
        ({"replicas": {"count": 9}}, "use at most 8"),
        ({"replicas": {"bind": "0.0.0.0"}}, "give replicas.secret_file"),
        ({"replicas": {"lighthouse": "somewhere"}}, "replicas.lighthouse"),
    ],
)
def test_what_replicas_cannot_have_is_refused_first(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve(make(tmp_path, **fields), world_size=1)


def test_a_replica_of_any_native_layout_is_accepted(tmp_path: Path) -> None:
    for fields in ({}, {"engine": "reference"}):
        assert resolve(make(tmp_path, **fields), world_size=1).replicated
    for stage in (0, 2, 3):
        assert resolve(make(tmp_path, zero_optimization={"stage": stage}), world_size=2).replicated


def test_replicas_that_would_make_other_updates_or_apply_other_steps_have_another_digest(tmp_path: Path) -> None:
    def digest(device: str = "cpu", **fields: Any) -> str:
        engine: Any = SimpleNamespace(device_name=device, edit_state=lambda: nullcontext({}))
        config = resolve(make(tmp_path, **fields), world_size=1).config
        return digest_of_run(
            engine, {}, anomalies=config.anomalies, engine_name=config.engine, stage=config.zero_optimization.stage
        )

    others = [
        digest("another"),
        digest(engine="reference"),
        digest(anomalies={"recheck": False}),
        digest(anomalies={"non_finite": "skip"}),
        digest(zero_optimization={"stage": 2}),
    ]
    assert len({digest(), *others}) == 1 + len(others)
    assert digest() == digest()


def test_ordinary_checkpoints_of_one_step_with_other_bytes_are_not_taken_for_equal() -> None:
    def commit(fingerprint: str, **details: Any) -> str:
        manifest = SimpleNamespace(fingerprint=fingerprint, details=details)
        checkpoint: Any = SimpleNamespace(step=5, manifest=manifest)
        return member_at("a", checkpoint, layout="x").commit

    assert commit("one") == commit("one")
    assert commit("one") != commit("another")
    of_replica = {"replicas": {"exchanges": 5, "commit": "c5"}}
    assert commit("one", **of_replica) == commit("another", **of_replica) == "c5"
    assert member_at("a", None, layout="x").commit == ""


@given(
    st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.sampled_from([1, 2])
)
def test_the_ranks_of_all_replicas_have_every_sample_of_a_step_once(
    samples: int, replicas: int, dp: int, micro: int, shapes_change: bool, multiple_of: int
) -> None:
    batch = BatchSizes(samples, micro, -(-samples // (micro * dp)), dp, 32)
    found: list[int] = []
    for ranges in divide(((0, samples),), [f"{n}" for n in range(replicas)]).values():
        part = part_of_batch(batch, ranges, shapes_change=shapes_change, multiple_of=multiple_of)
        assert part.micro <= micro
        assert part.accumulation % multiple_of == 0
        rows = np.concatenate([samples_of_rows(part, rank) for rank in range(dp)])
        assert rows.size == part.micro * part.accumulation * dp
        found += rows[rows < samples].tolist()
    assert sorted(found) == list(range(samples))
