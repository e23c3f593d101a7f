"""Relations of tokens: the losses are their formulas, the gradients autograd's, and chunks change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.run.distillation import relations
from pipeline.run.distillation.relations import Kind, Pairs, Vectors, relation_loss

B, R, T = 2, 3, 7


def made(kind: Kind) -> tuple[Tensor, Tensor, Pairs]:
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


def by_formula(kind: Kind, student: Tensor, teacher: Tensor, pairs: Pairs) -> Tensor:
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
def test_a_relation_loss_and_gradient_are_the_formulas(kind: Kind, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relations, "SCORES", rows * B * R * T)
    student, teacher, pairs = made(kind)
    expected = by_formula(kind, student, teacher, pairs)
    [its_gradient] = torch.autograd.grad(expected, student)
    loss = relation_loss(kind, Vectors(student, student), Vectors(teacher, teacher), pairs)
    [gradient] = torch.autograd.grad(3.0 * loss, student)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, 3.0 * its_gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", ["kl", "similarity"])
def test_rows_and_columns_have_gradients_of_their_own(kind: Kind) -> None:
    """As with context parallelism, where a rank has some of the rows, and the columns of all."""
    student, teacher, pairs = made(kind)
    some = torch.tensor([1, 4, 5])
    part = replace(pairs, rows=some, weights=pairs.weights[:, some])
    rows, columns = (each.detach().requires_grad_() for each in (student[:, :, some], student))

    def loss(own: Tensor, others: Tensor) -> Tensor:
        return relation_loss(kind, Vectors(own, others), Vectors(teacher[:, :, some], teacher), part)

    assert torch.autograd.gradcheck(loss, (rows, columns))


@pytest.mark.parametrize("kind", ["kl", "similarity"])
def test_the_same_vectors_have_no_loss_and_a_turned_space_is_the_same(kind: Kind) -> None:
    student, _, pairs = made(kind)
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    turned = (student @ turn).detach()
    loss = relation_loss(kind, Vectors(student, student), Vectors(turned, turned), pairs)
    [gradient] = torch.autograd.grad(loss, student)
    assert loss.item() == pytest.approx(0.0, abs=1e-12)
    assert gradient.abs().max() < 1e-12


def test_bf16_vectors_are_compared_in_fp32_and_get_gradients_in_bf16() -> None:
    student, teacher, pairs = made("kl")
    halves = student.detach().bfloat16().requires_grad_()
    loss = relation_loss("kl", Vectors(halves, halves), Vectors(teacher.bfloat16(), teacher.bfloat16()), pairs)
    exact = halves.detach().double(), teacher.bfloat16().double()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(by_formula("kl", *exact, pairs).item(), rel=1e-5)
    [gradient] = torch.autograd.grad(loss, halves)
    assert gradient.dtype == torch.bfloat16
