"""Losses of distillation are their formulas, gradients autograd's: divergences over a sharded vocabulary, relations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config.sections.compression import DistillSection
from pipeline.data.micro_batch import IGNORE
from pipeline.run.distillation import relations
from pipeline.run.distillation.divergence import (
    Divergence,
    Kind,
    bucket_divergence_and_gradient,
    divergence_and_gradient,
    log_probabilities,
)
from pipeline.run.distillation.objective import Distillation
from pipeline.run.distillation.relations import Pairs, Vectors, relation_loss

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


B, R, T = 2, 3, 7


def made_vectors(kind: relations.Kind) -> tuple[Tensor, Tensor, Pairs]:
    """Vectors fp64 of student [B, R, T, 4] and teacher [B, R, T, 6], documents and rows that do not count."""
    torch.manual_seed(0)
    student, teacher = (torch.randn(B, R, T, d, dtype=torch.float64) for d in (4, 6))
    if kind == "similarity":
        student, teacher = F.normalize(student, dim=-1), F.normalize(teacher, dim=-1)
    weights = torch.ones(B, T)
    weights[0, 2] = weights[1, 6] = 0.0
    documents = torch.tensor([[0] * 7, [0] * 3 + [1] * 4], dtype=torch.int32)
    positions = torch.arange(T)
    return student.requires_grad_(), teacher, Pairs(positions, positions, weights, documents)


def relation_by_formula(kind: relations.Kind, student: Tensor, teacher: Tensor, pairs: Pairs) -> Tensor:
    total = student.new_zeros(())
    for b in range(B):
        for i in range(T):
            seen = [j for j in range(i + 1) if pairs.documents[b, j] == pairs.documents[b, i]]
            for r in range(R):
                s, t = (each[b, r, seen] @ each[b, r, i] for each in (student, teacher))
                if kind == "kl":
                    p, q = torch.softmax(t / 6**0.5, 0), torch.softmax(s / 4**0.5, 0)
                    loss = (p * (p.log() - q.log())).sum()
                else:
                    loss = (s - t).square().mean()
                total = total + pairs.weights[b, i] * loss / R
    return total


@pytest.mark.parametrize("kind", ["kl", "similarity"])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_a_relation_loss_and_gradient_are_the_formulas(
    kind: relations.Kind, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relations, "SCORES", rows * B * R * T)
    student, teacher, pairs = made_vectors(kind)
    expected = relation_by_formula(kind, student, teacher, pairs)
    [its_gradient] = torch.autograd.grad(expected, student)
    loss = relation_loss(kind, Vectors(student, student), Vectors(teacher, teacher), pairs)
    [gradient] = torch.autograd.grad(3.0 * loss, student)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, 3.0 * its_gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", ["kl", "similarity"])
def test_rows_and_columns_have_gradients_of_their_own(kind: relations.Kind) -> None:
    """As with context parallelism, where a rank has some of the rows, and the columns of all."""
    student, teacher, pairs = made_vectors(kind)
    some = torch.tensor([1, 4, 5])
    part = replace(pairs, rows=some, weights=pairs.weights[:, some])
    rows, columns = (each.detach().requires_grad_() for each in (student[:, :, some], student))

    def loss(own: Tensor, others: Tensor) -> Tensor:
        return relation_loss(kind, Vectors(own, others), Vectors(teacher[:, :, some], teacher), part)

    assert torch.autograd.gradcheck(loss, (rows, columns))


@pytest.mark.parametrize("kind", ["kl", "similarity"])
def test_the_same_vectors_have_no_loss_and_a_turned_space_is_the_same(kind: relations.Kind) -> None:
    student, _, pairs = made_vectors(kind)
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    turned = (student @ turn).detach()
    loss = relation_loss(kind, Vectors(student, student), Vectors(turned, turned), pairs)
    [gradient] = torch.autograd.grad(loss, student)
    assert loss.item() == pytest.approx(0.0, abs=1e-12)
    assert gradient.abs().max() < 1e-12


def test_bf16_vectors_are_compared_in_fp32_and_get_gradients_in_bf16() -> None:
    student, teacher, pairs = made_vectors("kl")
    halves = student.detach().bfloat16().requires_grad_()
    loss = relation_loss("kl", Vectors(halves, halves), Vectors(teacher.bfloat16(), teacher.bfloat16()), pairs)
    exact = halves.detach().double(), teacher.bfloat16().double()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(relation_by_formula("kl", *exact, pairs).item(), rel=1e-5)
    [gradient] = torch.autograd.grad(loss, halves)
    assert gradient.dtype == torch.bfloat16
