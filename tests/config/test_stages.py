"""Stages and batch ramps: samples and tokens of every step follow from the config, and bad borders are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.accounts import StageBatches, StepAccounts, make_accounts
from pipeline.config.rules.curve import changed_fields, recorded_schedule
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config
from pipeline.config.sections.stages import BatchRampSection, UntilSection
from pipeline.config.stages import stage_configs

STABLE = {"name": "stable", "until": {"steps": 10}}
LONG = {"name": "long", "data": {"sequence_length": 64}}
RAMP = {"from": 4, "to": 16, "over_tokens": 1024}


def raw(*stages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "engine": "torch",
        "model": {"config": {"model_type": "llama", "max_position_embeddings": 512}},
        "data": {"sources": [{"path": "a"}], "sequence_length": 32},
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "run": {"dir": "run", "steps": 20},
        **({"stages": list(stages)} if stages else {}),
        **fields,
    }


def resolved(*stages: dict[str, Any], ranks: int = 2, **fields: Any) -> ResolvedRun:
    return resolve(parse(Config, raw(*stages, **fields)), world_size=ranks)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[StageBatches], int]:
    """Stages that end after random steps, and the steps of the run; ramps may pass over batch sizes."""
    stages: list[StageBatches] = []
    end = 0
    for number in range(draw(st.integers(1, 4))):
        length, ramp, samples = draw(st.sampled_from([8, 64])), None, draw(st.integers(1, 9))
        end += draw(st.integers(1, 30))
        if draw(st.booleans()):
            first, by, more = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
            samples = first + by * more
            over = draw(st.integers(1, 40)) * length
            ramp = BatchRampSection(**{"from": first}, to=samples, over_tokens=over, by=by)
            end += 200  # so that every ramp ends within its stage
        stages.append(StageBatches(str(number), samples, length, UntilSection(steps=end), ramp))
    return stages, end


@given(runs())
@settings(max_examples=200, deadline=None)
def test_closed_forms_equal_a_count_step_by_step(case: tuple[list[StageBatches], int]) -> None:
    stages, steps = case
    accounts = make_accounts(stages, steps=steps, tokens=None)
    samples = tokens = number = own = 0
    for step in range(1, steps + 1):
        if accounts.stage(step) != number:
            number, own = number + 1, 0
        stage = stages[number]
        size = stage.samples
        if stage.ramp is not None:  # Megatron-LM's rule: the batch follows from the tokens consumed so far
            count = (stage.ramp.to - stage.ramp.start) // (stage.ramp.by or 1)
            size = stage.ramp.start + min(count, own * count // stage.ramp.over_tokens) * (stage.ramp.by or 1)
        assert accounts.samples_in(step) == size
        samples, tokens, own = samples + size, tokens + size * stage.sequence_length, own + size * stage.sequence_length
        assert (accounts.samples(step), accounts.tokens(step)) == (samples, tokens)
        assert accounts.step_of_sample(samples - 1) == step
    assert number == len(stages) - 1
    assert sum(row["tokens"] for row in accounts.ledger(steps)) == tokens
    assert [accounts.last_step(stage) for stage in range(len(stages))] == [
        stage.until.steps for stage in stages if stage.until
    ]


def test_two_million_steps_of_a_long_ramp_are_a_small_ledger() -> None:
    ramp = BatchRampSection(**{"from": 16}, to=4096, over_tokens=10**12, by=16)
    accounts = make_accounts([StageBatches("s", 4096, 4096, None, ramp)], steps=2_000_000, tokens=None)
    assert len(accounts.spans) == 256
    assert len(json.dumps(accounts.ledger(2_000_000))) < 50_000  # bytes; it is in every checkpoint's manifest
    assert accounts.tokens(2_000_000) == sum(row["tokens"] for row in accounts.ledger(2_000_000))


def test_a_config_without_stages_is_one_stage_of_equal_steps() -> None:
    run = resolved()
    assert run.accounts == StepAccounts.constant(8, 32, 20)
    assert (run.stages, run.place, run.first_step, run.last_step) == ((), None, 1, 20)
    assert run.written_config is run.config
    [only] = stage_configs(run.config)
    assert only.config == run.config


def test_a_stage_changes_what_it_names_and_keeps_the_rest_of_the_stage_before() -> None:
    wsd = {"type": "WSD", "params": {"warmup_num_steps": 2, "decay_num_steps": 4}}
    first = {**STABLE, "train_batch_size": RAMP, "data": {"mask_documents": True}}
    last = {
        "name": "anneal",
        "scheduler": wsd,
        "optimizer": {"params": {"lr": 1e-4}},
        "data": {"sources": [{"path": "b"}]},
    }
    run = resolved(first, {**LONG, "until": {"steps": 14}}, last)
    stable, long, anneal = run.stages
    assert [each.config.data.sequence_length for each in run.stages] == [32, 64, 64]
    assert [each.config.data.sources[0].path for each in run.stages] == ["a", "a", "b"]
    assert anneal.config.data.mask_documents
    assert (stable.batch.samples, long.batch.samples, stable.batch_of(1).samples) == (16, 16, 4)
    assert (stable.batch_of(1).accumulation, stable.batch.accumulation) == (1, 4)
    # a scheduler lasts from the stage that names it to the next that names another, in steps of its own
    assert (stable.schedule.kind, anneal.schedule.begin, anneal.schedule.total) == ("constant", 14, 6)
    assert [anneal.schedule.lr(step) for step in (15, 16, 20)] == [0.5e-4, 1e-4, 0.0]


WSD = {"type": "WSD", "params": {"warmup_num_steps": 4, "decay_num_steps": 5}, "count": "tokens"}
COSINE = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 4}, "count": "tokens"}


@pytest.mark.parametrize("scheduler", [WSD, COSINE])
def test_a_schedule_in_tokens_is_the_one_in_steps_where_the_batch_is_constant(scheduler: dict[str, Any]) -> None:
    for stages in ([], [STABLE, {"name": "b"}], [STABLE, {"name": "b", "scheduler": scheduler}]):
        counted = [resolved(*stages, scheduler={**scheduler, "count": each}) for each in ("steps", "tokens")]
        rates = [[run.at(step).schedule.lr(step) for step in range(1, run.steps + 1)] for run in counted]
        assert rates[0] == rates[1]


def test_with_a_ramp_a_schedule_in_tokens_depends_on_tokens_alone_and_is_read_again_from_the_record() -> None:
    batch = {"from": 8, "to": 16, "over_tokens": 1024}
    ramp = resolved(train_batch_size=batch, scheduler=WSD)
    plain = resolved(train_batch_size=16, scheduler=WSD, run={"dir": "r", "tokens": ramp.accounts.tokens(ramp.steps)})
    by_tokens = {plain.accounts.tokens(step): plain.schedule.lr(step) for step in range(1, plain.steps + 1)}
    rates = {ramp.accounts.tokens(step): ramp.schedule.lr(step) for step in range(1, ramp.steps + 1)}
    equal = rates.keys() & by_tokens.keys()
    assert len(equal) == plain.steps
    assert plain.steps < ramp.steps
    assert {tokens: rates[tokens] for tokens in equal} == {tokens: by_tokens[tokens] for tokens in equal}
    in_steps = resolved(train_batch_size=batch, scheduler={**WSD, "count": "steps"})
    assert in_steps.schedule.lr(1) == 2 * ramp.schedule.lr(1)  # half of the tokens of a whole step
    recorded = json.loads(json.dumps({"scheduler": ramp.schedule.describe()}))
    assert [recorded_schedule(recorded, step).lr(step) for step in (1, 7, ramp.steps)] == [
        ramp.schedule.lr(step) for step in (1, 7, ramp.steps)
    ]
    other = resolved(train_batch_size={"from": 4, "to": 16, "over_tokens": 1024}, scheduler=WSD)
    changed = changed_fields(recorded, {"scheduler": other.schedule.describe()})
    assert "scheduler.spans" in [field for field, _, _ in changed]  # a resume compares them


def test_a_run_with_stages_is_read_again_from_its_manifest() -> None:
    run = resolved({**STABLE, "train_batch_size": RAMP}, {**LONG, "scheduler": None})
    written = run.written_config.model_dump(mode="json")
    again = resolve(parse(Config, json.loads(json.dumps(written))), world_size=2)
    assert again.accounts == run.accounts
    assert [each.config for each in again.stages] == [each.config for each in run.stages]


BAD = {
    "ends before it begins": ([{**STABLE, "until": {"steps": 20}}, LONG], "run.steps = 20", "use a larger number"),
    "ends where the one before does": (
        [STABLE, {**LONG, "until": {"steps": 10}}, {"name": "c"}],
        "stages.1.until.steps = 10",
        "the stages before it (stable) take 10 steps",
    ),
    "within a step": (
        [{**STABLE, "until": {"tokens": 1000}}, LONG],
        "stages.0.until.tokens = 1000",
        "use 768 or 1,024",
    ),
    "no end": ([{"name": "a"}, LONG], "stages.0.until = 'rest'", "give its end"),
    "two ends": ([{**STABLE, "until": {"steps": 1, "tokens": 256}}, LONG], "stages.0.until", "give exactly one"),
    "another length than the run": (
        [STABLE, {**LONG, "until": {"steps": 30}}],
        "stages.1.until",
        "leave it out: the rest",
    ),
    "ramp that does not divide": (
        [{**STABLE, "train_batch_size": {**RAMP, "from": 6}}, LONG],
        "stages.0.train_batch_size.from = 6",
        "use 4 or 8",
    ),
    "ramp to what does not divide": (
        [{**STABLE, "train_batch_size": {**RAMP, "to": 18}}, LONG],
        "stages.0.train_batch_size = 18",
        "use 16 or 20",
    ),
    "ramp in odd increments": (
        [{**STABLE, "train_batch_size": {**RAMP, "by": 5}}, LONG],
        "stages.0.train_batch_size.by = 5",
        "use 4, or leave it out",
    ),
    "ramp that shrinks": (
        [{**STABLE, "train_batch_size": {**RAMP, "from": 16}}, LONG],
        "stages.0.train_batch_size.from = 16",
        "use less than 16",
    ),
    "ramp longer than its stage": (
        [{**STABLE, "train_batch_size": {**RAMP, "over_tokens": 100_000}}, LONG],
        "stages.0.train_batch_size.over_tokens = 100000",
        "use fewer tokens, or a longer stage",
    ),
    "typo in a stage": ([STABLE, {"name": "b", "dat": {}}], "stages.1.dat", "did you mean 'data'?"),
    "typo in a section": (
        [STABLE, {"name": "b", "data": {"sequence_lenght": 64}}],
        "stages.1.data.sequence_lenght = 64",
        "did you mean 'sequence_length'?",
    ),
    "two of one name": ([STABLE, {**LONG, "name": "stable"}], "stages.1.name = 'stable'", "a name of its own"),
    "another model": ([STABLE, {"name": "b", "model": {"path": "x"}}], "stages.1.model.path = 'x'", "model.config"),
    "another optimizer": (
        [STABLE, {"name": "b", "optimizer": {"type": "Lion"}}],
        "stages.1.optimizer.type",
        "params only",
    ),
    "positions": (
        [STABLE, {"name": "b", "data": {"sequence_length": 1024}}],
        "stages.1.data.sequence_length = 1024",
        "raise max_position_embeddings",
    ),
    "sources cannot go on": (
        [STABLE, {**LONG, "continue_sources": True}],
        "stages.1.continue_sources = True",
        "data.sequence_length is 32 in stage 'stable' and 64 in this",
    ),
    "a layout of another size": (
        [STABLE, {"name": "b", "parallel": {"tp": 4}}],
        "stages.1.parallel",
        "start 4 or 8 processes",
    ),
    "nothing to go on with": (
        [STABLE, {"name": "b", "data": {"sources": [{"path": "b"}]}, "continue_sources": True}],
        "stages.1.continue_sources = True",
        "stage 'stable' has none of its sources",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_stages_are_refused_with_key_value_and_remedy(name: str) -> None:
    stages, key, said = BAD[name]
    with pytest.raises(ConfigError) as error:
        resolved(*stages)
    assert key in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("islands", {"steps": 3}),
        ("replicas", {}),
        ("distill", {"teacher": "x"}),
        (
            "data",
            {"sources": [{"path": "a"}], "sequence_length": 32, "curriculum": [{"after_step": 0, "weights": {"a": 1}}]},
        ),
    ],
)
def test_what_counts_equal_steps_is_refused_by_name(field: str, value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="stages") as error:
        resolved(STABLE, LONG, **{field: value})
    assert error.value.field.split(".")[0] == field


def test_a_ramp_needs_steps_of_any_number_of_micro_batches() -> None:
    with pytest.raises(ConfigError, match=r"does not work with parallel\.pp 2"):
        resolved(parallel={"pp": 2}, train_batch_size=RAMP, ranks=2)


def test_the_processes_that_end_a_stage_begin_the_next() -> None:
    with pytest.raises(ConfigError, match="its layout takes 2 processes, and that of the first stage 3") as error:
        resolved(STABLE, {"name": "b", "parallel": {"tp": 2}}, ranks=3, parallel={"elastic": True})
    assert error.value.field == "stages.1.parallel"
