"""Divergences: they are their formulas, their gradients are autograd's, and a sharded vocabulary changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config.sections.compression import DistillSection
from pipeline.data.micro_batch import IGNORE
from pipeline.run.distillation.divergence import (
    Divergence,
    Kind,
    bucket_divergence_and_gradient,
    divergence_and_gradient,
    log_probabilities,
)
from pipeline.run.distillation.objective import Distillation

KINDS = [Divergence(kind, temperature=2.5, beta=0.3) for kind in ("forward_kl", "reverse_kl", "jsd")]


def by_formula(divergence: Divergence, log_p: Tensor, log_q: Tensor) -> Tensor:
    """The divergence of each row, as the papers write it."""

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(one > 0, one * (one.log() - other.log()), 0.0).sum(-1)

    p, q, beta = log_p.exp(), log_q.exp(), divergence.beta
    m = beta * p + (1 - beta) * q
    of_kind: dict[Kind, Callable[[], Tensor]] = {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(p, m) + (1 - beta) * kl(q, m),
    }
    return of_kind[divergence.kind]()


def made() -> tuple[Tensor, Tensor, Tensor]:
    """Logits fp64 [2, 5, 11] of teacher and student, and labels with positions that do not count."""
    torch.manual_seed(0)
    teacher, student = (3 * torch.randn(2, 5, 11, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(0, 11, (2, 5))
    labels[0, 3] = labels[1, 0] = IGNORE
    return teacher, student.requires_grad_(), labels


@pytest.mark.parametrize("divergence", KINDS, ids=lambda each: each.kind)
def test_a_divergence_and_its_gradient_are_those_of_the_formula_in_fp64(divergence: Divergence) -> None:
    teacher, student, labels = made()
    logs = (torch.log_softmax(each / divergence.temperature, -1) for each in (teacher, student))
    expected = (by_formula(divergence, *logs) * (labels != IGNORE)).sum()
    expected.backward()
    value, gradient = divergence_and_gradient(divergence, teacher, student.detach(), labels)
    assert student.grad is not None
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, student.grad, rtol=1e-10, atol=1e-13)
    none, zero = divergence_and_gradient(divergence, teacher, teacher, labels)
    assert none.item() == pytest.approx(0.0, abs=1e-12)
    assert zero.abs().max() < 1e-12


@pytest.mark.parametrize("k", [1, 4, 10])
@pytest.mark.parametrize("divergence", KINDS, ids=lambda each: each.kind)
def test_with_a_rest_the_divergence_is_that_of_k_ids_and_one_more_outcome(divergence: Divergence, k: int) -> None:
    teacher, student, labels = made()
    log_p = log_probabilities(teacher, divergence.temperature)
    values, ids = log_p.topk(k, dim=-1)
    rest = log_p.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    known = torch.cat([values, rest.log()], -1)
    q = torch.softmax(student / divergence.temperature, -1)
    other = q.scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    buckets = torch.cat([q.gather(-1, ids), other], -1).log()
    expected = (by_formula(divergence, known, buckets) * (labels != IGNORE)).sum()
    expected.backward()
    value, gradient = bucket_divergence_and_gradient(divergence, ids, known, student.detach(), labels)
    assert student.grad is not None
    assert value.item() == pytest.approx(expected.item(), rel=1e-11)
    torch.testing.assert_close(gradient, student.grad, rtol=1e-9, atol=1e-12)
    # merging outcomes can only lose (data processing inequality)
    assert value <= divergence_and_gradient(divergence, teacher, student.detach(), labels)[0] * (1 + 1e-12)


@pytest.mark.parametrize("divergence", KINDS, ids=lambda each: each.kind)
def test_with_all_ids_known_nothing_is_lost(divergence: Divergence) -> None:
    teacher, student, labels = made()
    log_p = log_probabilities(teacher, divergence.temperature)
    values, ids = log_p.topk(11, dim=-1)
    known = torch.cat([values, torch.full_like(values[..., :1], -math.inf)], -1)
    expected, its_gradient = divergence_and_gradient(divergence, teacher, student.detach(), labels)
    value, gradient = bucket_divergence_and_gradient(divergence, ids, known, student.detach(), labels)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, its_gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("divergence", KINDS, ids=lambda each: each.kind)
def test_extreme_logits_give_finite_numbers_and_positions_without_targets_add_nothing(divergence: Divergence) -> None:
    torch.manual_seed(0)
    teacher, student = 1000 * torch.randn(2, 5, 11), 1000 * torch.randn(2, 5, 11)
    labels = torch.zeros(2, 5, dtype=torch.int64)
    ids, known = torch.arange(3).expand(2, 5, 3), torch.tensor([-0.5, -1.5, -9.0, -20.0]).expand(2, 5, 4)
    for counted in (True, False):
        given = labels if counted else torch.full_like(labels, IGNORE)
        for value, gradient in (
            divergence_and_gradient(divergence, teacher, student, given),
            bucket_divergence_and_gradient(divergence, ids, known, student, given),
        ):
            assert torch.isfinite(value)
            assert torch.isfinite(gradient).all()
            if not counted:
                assert value.item() == 0.0
                assert gradient.count_nonzero() == 0


def test_jsd_goes_from_forward_to_reverse_kl_with_beta() -> None:
    """The limits that GKD (arXiv:2306.13649) states in section 2: JSD / beta, and JSD / (1 - beta)."""
    teacher, student, labels = made()
    small = 1e-8
    for beta, kind in ((small, "forward_kl"), (1 - small, "reverse_kl")):
        jsd, _ = divergence_and_gradient(Divergence("jsd", 1.0, beta), teacher, student.detach(), labels)
        limit, _ = divergence_and_gradient(Divergence(kind, 1.0), teacher, student.detach(), labels)  # type: ignore[arg-type]
        assert jsd.item() / small == pytest.approx(limit.item(), rel=1e-3)


def test_the_loss_weighs_the_divergence_by_alpha_and_by_the_square_of_the_temperature() -> None:
    nats, slope = torch.tensor(3.0), torch.rand(1, 2, 5)
    reference: Any = SimpleNamespace(compare=lambda *_, **__: (nats, slope.clone()))
    objective = Distillation(DistillSection(teacher="it", temperature=2.0, alpha=0.4), reference)
    logits, labels = torch.randn(1, 2, 5), torch.tensor([[1, 4]])
    loss, gradient = objective.with_gradient(logits, labels)
    assert float(loss.total) == pytest.approx(0.4 * 2.0**2 * 3.0 + 0.6 * float(loss.parts[0]))
    of_cross_entropy = torch.softmax(logits, -1) - torch.nn.functional.one_hot(labels, 5)
    torch.testing.assert_close(gradient, 0.4 * 2.0**2 * slope + 0.6 * of_cross_entropy)
