"""The fit finds a known law, is not drawn away by one bad run, and reaches the minimum that torch's L-BFGS reaches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.plan.ladder.fit import DELTA, FIXED, Points, can_fit, fit, huber
from tests.plan.ladder.recorded import LAW, loss, made


def test_a_known_law_is_found_from_losses_without_noise() -> None:
    points, _ = made(noise=0.0)
    law = fit(points, "free exponents")
    assert law.described() == pytest.approx(LAW, rel=1e-3)
    assert law.predict(2e6, 5e6)[0] == pytest.approx(loss(2e6, 5e6), rel=1e-5)


def test_one_bad_run_hardly_moves_the_law() -> None:
    """The Huber loss counts it as little; by least squares the prediction would follow it."""
    points, _ = made(noise=0.0)
    losses = points.losses.copy()
    losses[5] *= 1.1
    law = fit(Points(points.parameters, points.tokens, losses), "free exponents")
    assert law.predict(2e6, 5e6)[0] == pytest.approx(loss(2e6, 5e6), rel=0.01)


def test_no_other_optimizer_finds_a_lower_objective() -> None:
    points, _ = made(noise=0.01, seed=4)
    law = fit(points, "free exponents")
    assert huber(law, points) <= _by_lbfgs(points) * (1 + 1e-3)


def _by_lbfgs(points: Points) -> float:
    """The objective as in the paper: log-sum-exp, Huber, L-BFGS from several starts."""
    n, d, logs = (torch.tensor(np.log(each)) for each in (points.parameters, points.tokens, points.losses))
    best = float("inf")
    for start in ([0.5, 3.0, 3.0, 0.3, 0.3], [0.0, 5.0, 5.0, 0.5, 0.5], [0.5, 4.0, 4.0, 0.25, 0.25]):
        values = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([values], max_iter=500, line_search_fn="strong_wolfe", tolerance_change=1e-14)

        def objective(values: torch.Tensor = values) -> torch.Tensor:
            e, a, b, alpha, beta = values
            terms = torch.stack([e.expand_as(n), a - alpha * n, b - beta * d])
            predicted = torch.logsumexp(terms, dim=0)
            return torch.nn.functional.huber_loss(predicted, logs, reduction="sum", delta=DELTA)

        def closure(optimizer: torch.optim.LBFGS = optimizer, values: torch.Tensor = values) -> torch.Tensor:
            optimizer.zero_grad()
            found = objective(values)
            found.backward()
            return found

        optimizer.step(closure)
        best = min(best, objective(values).item())
    return best


def test_fixed_exponents_are_those_that_are_named() -> None:
    points, _ = made(noise=0.0)
    law = fit(points, "fixed exponents").described()
    assert (law["alpha"], law["beta"]) == FIXED


def test_every_row_of_weights_is_a_law_of_its_own() -> None:
    points, _ = made(noise=0.02, seed=1)
    weights = np.ones((2, len(points)))
    weights[1, :6] = 3
    both = fit(points, "fixed exponents", weights=weights)
    repeated = points.take(np.concatenate([np.arange(len(points)), np.repeat(np.arange(6), 2)]))
    alone = [fit(points, "fixed exponents"), fit(repeated, "fixed exponents")]
    expected = [law.predict(2e6, 5e6)[0] for law in alone]
    assert both.predict(2e6, 5e6) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("runs", "free", "fixed"), [(12, True, True), (5, False, True), (3, False, False)])
def test_as_many_runs_are_needed_as_there_are_unknowns(runs: int, free: bool, fixed: bool) -> None:
    points, _ = made(noise=0.0)
    some = points.take(np.arange(runs))
    assert can_fit(some, "free exponents") is free
    assert can_fit(some, "fixed exponents") is fixed
