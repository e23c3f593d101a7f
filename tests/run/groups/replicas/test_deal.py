"""What a quorum of replicas decides: every sample of a step once, in any layout (law 1); and what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
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
from pipeline.run.groups.replicas.deal import (
    Ranges,
    ReplicaDecision,
    ReplicaMember,
    compatible,
    count_of,
    decide,
    divide,
)
from tests.conftest import tiny_config

SAMPLES = 8


def member(name: str, *, step: int = 3, held: Ranges = (), between: bool = True, living: bool = True) -> ReplicaMember:
    return ReplicaMember(
        name, step, step, f"c{step}", f"c{step - 1}", held, between, "", living, waited=False, layout="x"
    )


def decided(*members: ReplicaMember) -> ReplicaDecision:
    return decide(members, samples=SAMPLES, quorum=7)


def test_a_step_is_divided_into_contiguous_ranges_of_largest_remainder() -> None:
    assert decided(*map(member, "cab")).parts == {"a": ((0, 3),), "b": ((3, 6),), "c": ((6, 8),)}


@given(
    st.sets(st.integers(0, 40)).map(sorted).filter(lambda cuts: len(cuts) % 2 == 0),
    st.sets(st.sampled_from("abcde"), min_size=1).map(sorted),
)
def test_every_sample_is_in_one_part(cuts: list[int], names: list[str]) -> None:
    ranges = tuple(zip(cuts[::2], cuts[1::2], strict=True))
    parts = divide(ranges, names)
    samples = [n for part in parts.values() for first, end in part for n in range(first, end)]
    assert samples == [n for first, end in ranges for n in range(first, end)]
    counts = [count_of(parts.get(name, ())) for name in names]
    assert max(counts) - min(counts) <= 1


def test_what_a_dead_replica_would_have_run_is_divided_over_the_others_in_the_same_step() -> None:
    left = [member("a", held=((0, 3),), between=False), member("c", held=((6, 8),), between=False)]
    found = decided(*left)
    assert (found.names, found.parts) == (("a", "c"), {"a": ((3, 5),), "c": ((5, 6),)})


def test_gradients_are_exchanged_when_no_sample_is_left() -> None:
    both = [member("a", held=((0, 4),), between=False), member("b", held=((4, 8),), between=False)]
    assert decided(*both).parts == {}


def test_a_late_comer_takes_the_state_of_a_living_replica_between_two_steps_and_a_part_of_the_next() -> None:
    found = decided(member("a"), replace(member("b", step=2, living=False), exchanges=9))
    assert (found.source, found.healed, found.parts) == ("a", ("b",), {"a": ((0, 4),), "b": ((4, 8),)})


def test_work_that_a_checkpoint_holds_is_not_given_up_for_replicas_that_began_earlier_in_the_run() -> None:
    found = decided(member("a"), member("b", step=40, living=False))
    assert (found.ahead, found.healed, found.names) == (("b",), (), ("a",))
    # that step is being run once more: b has died after an exchange that a has missed
    found = decided(member("a", between=False), member("b", step=4, living=False))
    assert (found.ahead, found.waiting) == ((), ("b",))


def test_a_late_comer_waits_while_a_step_is_run() -> None:
    found = decided(member("a", held=((0, 8),), between=False), member("b", living=False))
    assert (found.names, found.waiting, found.healed, found.parts) == (("a",), ("b",), (), {})


def test_a_replica_that_missed_the_last_exchange_is_given_its_result_first() -> None:
    found = decided(member("a", step=4), member("b", step=3, held=((4, 8),), between=False))
    assert (found.source, found.late, found.parts) == ("a", ("b",), {})


def test_a_replica_that_was_healed_after_an_exchange_does_not_give_its_result() -> None:
    healed, has_result = replace(member("a", step=4), before=None), member("b", step=4)
    late = member("c", step=3, held=((4, 8),), between=False)
    found = decided(healed, has_result, late)
    assert (found.source, found.late) == ("b", ("c",))
    assert decided(healed, late).behind == ("c",)


def test_a_replica_that_missed_two_exchanges_is_left_behind() -> None:
    found = decided(member("a", step=5), member("b", step=3, held=((4, 8),), between=False))
    assert (found.names, found.behind) == (("a",), ("b",))


def test_replicas_that_have_finished_one_step_differently_do_not_go_on_together() -> None:
    other = replace(member("c"), commit="another")
    assert decided(member("a"), member("b"), other).behind == ("c",)


def test_replicas_that_have_answered_an_anomaly_differently_do_not_go_on_together() -> None:
    again = member("a", held=((0, 4),), between=False)  # executes step 4 once more, c has finished it
    others = [replace(member(name, step=4), commit="c3", exchanges=3) for name in "bc"]
    found = decided(again, *others)
    assert (found.names, found.behind) == (("b", "c"), ("a",))
    assert count_of(found.parts["b"]) + count_of(found.parts["c"]) == SAMPLES


def test_replicas_whose_losses_differ_after_the_same_exchanges_do_not_go_on_together() -> None:
    a, b, c = (replace(member(name), state=state) for name, state in (("a", "x"), ("b", "y"), ("c", "y")))
    found = decided(a, b, c)
    assert (found.names, found.behind) == (("b", "c"), ("a",))


def test_no_sample_counts_twice_where_a_slow_replica_comes_back_after_its_samples_were_given_away() -> None:
    both = [member("a", held=((0, 8),), between=False), member("b", held=((4, 8),), between=False)]
    found = decided(*both)
    assert (found.reset, found.parts) == (("b",), {})


def test_replicas_that_start_from_the_same_checkpoint_take_no_state_and_others_do() -> None:
    found = decided(member("a", living=False), member("b", living=False), member("c", step=1, living=False))
    assert (found.source, found.healed) == ("a", ("c",))


def test_a_process_group_is_kept_as_long_as_its_members_have_it() -> None:
    first = decided(member("a"), member("b"))
    assert (first.group, first.formed) == ("7/a,b", False)
    again = [replace(member(name, step=4), group=first.group) for name in "ab"]
    assert (decided(*again).group, decided(*again).formed) == ("7/a,b", True)
    assert not decided(again[0]).formed
    assert not decided(again[0], replace(again[1], group="")).formed


def test_every_replica_decides_the_same_in_whatever_order_the_members_come() -> None:
    members = [member("a"), member("b", step=2), member("c", living=False)]
    assert decided(*members) == decided(*members[::-1])


def test_members_survive_json() -> None:
    given_member = member("a", held=((0, 3), (5, 8)))
    assert ReplicaMember.from_plain(json.loads(json.dumps(given_member.plain()))) == given_member


def test_replicas_of_another_curve_or_layout_are_left_out() -> None:
    members = [replace(member("a", living=False), layout="y"), member("b")]
    assert [each.name for each in compatible(members)] == ["b"]


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
