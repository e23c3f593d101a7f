"""Two models' log-probabilities compared, against torch's own formulas; and what is outside a bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pipeline.compress.quantization.config import SCHEMES, SchemeName
from pipeline.evaluation.consumers.bounds import BOUNDS, Bound, bound_of, broken_bounds
from pipeline.evaluation.consumers.compare import ScoreComparison, compare
from pipeline.models.gguf.types import FILE_TYPES

N, T, V = 3, 9, 700


def log_probabilities(seed: int, *, n: int = N, t: int = T) -> torch.Tensor:
    return torch.randn(n, t - 1, V, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


@pytest.mark.parametrize("n", [N, 40])  # 24 positions, and 320, which are more than one block of rows
def test_the_comparison_is_that_of_torch(n: int) -> None:
    first, second = log_probabilities(0, n=n), log_probabilities(1, n=n)
    windows = torch.randint(0, V, (n, T), generator=torch.Generator().manual_seed(2))
    found = compare(first.numpy(), second.numpy(), windows.numpy())
    kl = F.kl_div(second.double(), first.double(), log_target=True, reduction="none").sum(-1)
    targets = windows[:, 1:].flatten()
    loss = F.nll_loss(second.flatten(0, 1).double(), targets)
    own = F.nll_loss(first.flatten(0, 1).double(), targets)
    assert found.mean_kl == pytest.approx(float(kl.mean()), rel=1e-6)
    assert found.max_kl == pytest.approx(float(kl.max()), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-6)
    assert found.original_perplexity == pytest.approx(math.exp(own), rel=1e-6)
    assert found.top1_agreement == int((first.argmax(-1) == second.argmax(-1)).sum()) / targets.numel()
    assert found.positions == n * (T - 1)


def test_a_model_is_no_distance_from_itself() -> None:
    same = log_probabilities(0).numpy()
    found = compare(same, same, np.zeros((N, T), dtype=np.int64))
    assert (found.mean_kl, found.max_kl, found.top1_agreement) == (0.0, 0.0, 1.0)


def compared(mean_kl: float, perplexity: float) -> ScoreComparison:
    return ScoreComparison(mean_kl, mean_kl, 1.0, perplexity, 10.0, 100)


def test_what_is_outside_a_bound_is_said_with_both_numbers() -> None:
    bound = Bound(0.1, 1.1)
    assert broken_bounds(compared(0.05, 10.5), bound) == []
    assert broken_bounds(compared(0.2, 10.5), bound) == ["mean KL to the original is 0.2 nats, and 0.1 is allowed"]
    [line] = broken_bounds(compared(0.05, 12.0), bound)
    assert "perplexity went from 10 to 12" in line
    assert len(broken_bounds(compared(math.nan, math.inf), bound)) == 2


def test_every_scheme_has_a_bound_and_more_bits_have_a_smaller_one() -> None:
    schemes = SchemeName.__args__  # type: ignore[attr-defined]
    assert set(schemes) == set(SCHEMES) | set(FILE_TYPES)
    assert set(schemes) <= set(BOUNDS)
    falling = ["Q2_K", "Q4_K_M", "Q5_K_M", "Q8_0", "BF16", "F32"]
    kls = [bound_of(name).mean_kl for name in falling]
    assert kls == sorted(kls, reverse=True)
