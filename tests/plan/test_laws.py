"""Published laws against values worked out elsewhere, and warnings of configs that are far from all of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pipeline.config.accounts import StageBatches, StepAccounts, make_accounts
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.stages import BatchRampSection, UntilSection
from pipeline.plan.laws.batch_ramp import ramp_effects
from pipeline.plan.laws.law_warnings import Training, training_of, warnings
from pipeline.plan.laws.laws import Quantity, chinchilla_loss, critical_batches, more_tokens, suggestions

ONE_B = Training(
    parameters=10**9,
    tokens=10**11,
    sequence_length=2048,
    batch=2**20,
    learning_rate=1e-3,
    weight_decay=0.1,
    warmup=10**9,
)


def _values(n: int, d: int, quantity: Quantity) -> dict[str, float]:
    return {each.law: each.value for each in suggestions(n, d, sequence_length=1) if each.quantity is quantity}


def test_step_law_at_the_paper_s_largest_model() -> None:
    """1B parameters, 100B tokens (arXiv:2503.04715, figure 1): 1.79 x 10^(-6.417 + 3.377) and 0.58 x 10^6.281."""
    assert _values(10**9, 10**11, Quantity.LEARNING_RATE)["Step Law"] == pytest.approx(1.79 * 10**-3.04, rel=1e-3)
    assert _values(10**9, 10**11, Quantity.BATCH)["Step Law"] == pytest.approx(0.58 * 10**6.281, rel=1e-3)


def test_step_law_and_power_lines_agree_on_the_batch_where_both_were_fitted() -> None:
    """Two groups, two grids: a wrong unit of either would be a factor of 2,048."""
    batches = _values(10**9, 10**11, Quantity.BATCH)
    assert batches["Power Lines"] == pytest.approx(batches["Step Law"], rel=0.15)


def test_weight_decay_of_a_published_run_follows_from_power_lines() -> None:
    """Llama 2 7B (arXiv:2307.09288): 4M tokens per step, 2T tokens, lr 3e-4, weight decay 0.1."""
    found = suggestions(6_500_000_000, 2 * 10**12, sequence_length=4096, batch=4e6, learning_rate=3e-4)
    decay = next(each.value for each in found if each.law == "Power Lines" and each.quantity is Quantity.WEIGHT_DECAY)
    assert decay == pytest.approx(0.1, rel=0.3)


def test_a_batch_is_never_smaller_than_a_sequence() -> None:
    found = suggestions(1000, 1000, sequence_length=4096)
    assert all(each.value >= 4096 for each in found if each.quantity is Quantity.BATCH)


@pytest.mark.parametrize("numbers", [(0, 10, 1), (10, 0, 1), (10, 10, 0)])
def test_nothing_is_suggested_for_no_parameters_or_tokens(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        suggestions(numbers[0], numbers[1], sequence_length=numbers[2])


def test_a_model_far_below_every_range_is_said_to_be_extrapolated() -> None:
    assert not any(each.in_range for each in suggestions(10**6, 2 * 10**6, sequence_length=128))
    assert any(each.in_range for each in suggestions(10**9, 10**11, sequence_length=2048))


def test_more_tokens_buy_ever_less() -> None:
    gains = more_tokens(10**9, ratios=(20, 40, 80, 160))
    changes = [each.loss_change for each in gains]
    steps = [after - before for before, after in itertools.pairwise(changes)]
    assert changes[0] == 0
    assert all(step < 0 for step in steps)
    assert steps == sorted(steps)


def test_the_refitted_chinchilla_law_agrees_with_the_published_one_at_chinchilla() -> None:
    """Hoffmann et al. 2022, equation 10, at 70B parameters and 1.4T tokens."""
    published = 1.69 + 406.4 / 70e9**0.34 + 410.7 / 1.4e12**0.28
    assert chinchilla_loss(70e9, 1.4e12) == pytest.approx(published, rel=0.03)


def test_a_config_near_a_law_is_not_warned_of() -> None:
    assert list(warnings(ONE_B)) == []


@pytest.mark.parametrize(
    ("change", "quantity"),
    [
        ({"learning_rate": 2e-2}, Quantity.LEARNING_RATE),
        ({"batch": 2**15}, Quantity.BATCH),
        ({"weight_decay": 0.0}, Quantity.WEIGHT_DECAY),
        ({"tokens": 10**9}, Quantity.TOKENS),
    ],
)
def test_a_config_far_from_all_laws_is_warned_of(change: dict[str, float], quantity: Quantity) -> None:
    # the weight decay follows from the batch and the learning rate: only the one of a case is far from its law
    lines = list(warnings(replace(ONE_B, **change)))
    assert any(line.startswith(quantity) for line in lines), lines
    assert all("by " in line for line in lines)


def test_the_laws_of_adamw_say_nothing_of_another_optimizer() -> None:
    assert list(warnings(replace(ONE_B, learning_rate=1.0, adamw=False))) == []


def test_the_hyperparameters_of_a_shipped_config() -> None:
    run = resolve(load_config("demo/teacher.json"), world_size=1)
    found = training_of(
        run.batch,
        run.schedule,
        run.config.optimizer,
        tokens=run.accounts.tokens(run.steps),
        parameters_non_embedding=1_180_000,
    )
    assert (found.batch, found.tokens, found.warmup) == (1024, 1880 * 1024, 40 * 1024)
    assert found.learning_rate == 4e-3


def test_the_critical_batch_at_the_loss_where_kaplan_et_al_plotted_it() -> None:
    """2.1e8 / L^4.76 (arXiv:2001.08361, figure 10): 2 to 3 million tokens at 2.5 nats, here at 1B and 8.4B tokens."""
    tokens = 8.4e9
    assert chinchilla_loss(1e9, tokens) == pytest.approx(2.65, abs=0.15)
    batches = critical_batches(1e9, tokens)
    assert 1e6 < batches["McCandlish"][0] < 4e6
    assert batches["Power Lines"][0] == pytest.approx(0.0471 * 10 ** (0.462 * 9.9243) * 2048, rel=1e-3)


def ramped(over_tokens: float) -> StepAccounts:
    """A ramp from 256 to 1,024 sequences in the first of two stages, 20B tokens in all."""
    ramp = BatchRampSection(**{"from": 256, "to": 1024, "over_tokens": over_tokens})
    stages = [StageBatches("stable", 1024, 2048, UntilSection(steps=8000), ramp), StageBatches("decay", 512, 2048)]
    return make_accounts(stages, steps=12000, tokens=None)


@pytest.mark.parametrize("over_tokens", [2_000_000_000, 4_000_000_000])
def test_a_ramp_takes_fewer_steps_than_its_first_batch_and_teaches_more_than_its_last(over_tokens: int) -> None:
    effects = list(ramp_effects(ramped(over_tokens), 0, 10**9))
    assert [each.law.split(" (")[0] for each in effects] == ["McCandlish"] * 2 + ["Power Lines"] * 2
    assert ["unverified" in each.law for each in effects] == [False, False, True, True]
    for small, large in zip(effects[::2], effects[1::2], strict=True):
        assert (small.batch, large.batch) == (256 * 2048, 1024 * 2048)
        assert 0 < small.fewer_steps < 0.75
        assert large.fewer_steps < 0
        assert large.loss_change < 0 < small.loss_change


def test_a_longer_ramp_saves_fewer_steps_and_costs_less_loss() -> None:
    short, long = (next(ramp_effects(ramped(over), 0, 10**9)) for over in (2_000_000_000, 4_000_000_000))
    assert long.fewer_steps < short.fewer_steps
    assert long.loss_change < short.loss_change


def test_a_batch_that_stays_has_no_effect() -> None:
    assert {(e.fewer_steps, e.loss_change) for e in ramp_effects(ramped(2_000_000_000), 1, 10**9)} == {(0.0, 0.0)}
