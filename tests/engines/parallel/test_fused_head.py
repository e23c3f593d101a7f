"""The head fused with the loss: gradients as without fusion, three matrix products, never all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config.sections.run import CompileSection
from pipeline.data.micro_batch import IGNORE
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.compilation import apply_compile
from pipeline.engines.parallel.fused_head import FusedHead, LossTask, fuse_head
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard
from tests.engines.parallel.allocations import AllocationRecorder
from tests.engines.parallel.ranks import Ranks, group_of

B, T, D, V = 3, 40, 16, 256
ROWS = 32
"""120 rows are four chunks of 30."""

Z = 0.01


def head_of(*, bias: bool = False, dtype: torch.dtype = torch.float32, columns: slice = slice(None)) -> Any:
    """A head with weights large enough that probabilities differ by many orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    weight, offset = torch.randn(V, D, generator=generator), torch.randn(V, generator=generator)
    head = nn.Linear(D, len(weight[columns]), bias=bias, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(weight[columns])
        if bias:
            head.bias.copy_(offset[columns])
    return head


def inputs(*, dtype: torch.dtype = torch.float32, ignored: str = "some") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, T, D, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(V, (B, T), generator=generator)
    labels[0, 2] = labels[1, :20] = IGNORE
    return hidden, torch.full_like(labels, IGNORE) if ignored == "all" else labels


def unfused(head: Any, hidden: Tensor, labels: Tensor, *, z_loss: float = Z, scale: float = 1.0) -> list[Tensor]:
    """Loss, its parts, and the gradients of `scale` times the loss."""
    loss = CrossEntropy(z_loss=z_loss)(head(hidden), labels)
    return [loss.total.detach(), *loss.parts, *torch.autograd.grad(loss.total * scale, [hidden, *head.parameters()])]


def task_of(
    labels: Tensor, *, z_loss: float = Z, rows: int = ROWS, vocabulary: VocabularyShard = FULL_VOCABULARY
) -> LossTask:
    return LossTask(CrossEntropy(z_loss=z_loss), labels, (), vocabulary, rows)


def fused(head: Any, hidden: Tensor, task: LossTask, *, scale: float = 1.0) -> list[Tensor]:
    fuse_head(head)
    total, *parts = head(hidden, task=task)
    return [total.detach(), *parts, *torch.autograd.grad(total * scale, [hidden, *head.parameters()])]


def error(found: Tensor, expected: Tensor) -> float:
    """Of the whole tensor, relative."""
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-9))


@pytest.mark.parametrize("ignored", ["some", "all"])
@pytest.mark.parametrize(("bias", "z_loss"), [(False, Z), (True, 0.0), (True, Z)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_loss_and_gradients_are_those_of_the_unfused_head(
    dtype: torch.dtype, tolerance: float, bias: bool, z_loss: float, ignored: str
) -> None:
    hidden, labels = inputs(dtype=dtype, ignored=ignored)
    expected = unfused(head_of(bias=bias, dtype=dtype), hidden, labels, z_loss=z_loss, scale=0.37)
    found = fused(head_of(bias=bias, dtype=dtype), hidden, task_of(labels, z_loss=z_loss), scale=0.37)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert error(ours, theirs.double()) <= tolerance
    assert bool(expected[-1].any()) == (ignored == "some")


@pytest.mark.parametrize("rows", [ROWS, B * T])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_gradients_are_as_exact_as_those_of_the_unfused_head(dtype: torch.dtype, rows: int) -> None:
    hidden, labels = inputs(dtype=dtype)
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_head = head_of(dtype=dtype).double()
    exact = unfused(exact_head, exact_hidden, labels)
    plain = [error(*pair) for pair in zip(unfused(head_of(dtype=dtype), hidden, labels), exact, strict=True)]
    ours = [
        error(*pair)
        for pair in zip(fused(head_of(dtype=dtype), hidden, task_of(labels, rows=rows)), exact, strict=True)
    ]
    # each chunk's product is rounded once more on a CPU, which has no product of half precision into fp32
    assert all(mine <= 1.1 * theirs + 1e-7 for mine, theirs in zip(ours, plain, strict=True)), (ours, plain)


def test_in_fp16_small_probabilities_are_not_lost_before_the_loss_scale_is_known() -> None:
    hidden, labels = inputs(dtype=torch.float16)
    head = head_of(dtype=torch.float16)
    with torch.no_grad():
        head.weight[1:] = 0.0
        head.weight[0], hidden[:] = 1.0, 1.0  # logits 16 and 0: other probabilities are 1.1e-7
    labels[:] = 0
    weight = fused(head, hidden, task_of(labels, z_loss=0.0), scale=64.0)[-1]
    exact = unfused(head.double(), hidden.detach().double().requires_grad_(), labels, z_loss=0.0, scale=64.0)[-1]
    assert error(weight[1:], exact[1:]) < 0.01


def test_a_backward_pass_can_be_repeated_for_each_input_as_zero_bubble_schedules_do() -> None:
    hidden, labels = inputs()
    expected = unfused(head_of(), hidden, labels)
    head = head_of()
    fuse_head(head)
    total = head(hidden, task=task_of(labels))[0]
    (for_hidden,) = torch.autograd.grad(total, [hidden], retain_graph=True)
    (for_weight,) = torch.autograd.grad(total, [head.weight])
    assert error(for_hidden, expected[-2].double()) < 1e-6
    assert error(for_weight, expected[-1].double()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_matrix_products_are_computed_and_the_logits_never_exist_as_a_whole(dtype: torch.dtype) -> None:
    hidden, labels = inputs(dtype=dtype)
    product = 2 * B * T * D * V
    for trained in (True, False):
        head = head_of(dtype=dtype).requires_grad_(trained)
        fuse_head(head)
        with AllocationRecorder() as recorder, FlopCounterMode(display=False) as flops:
            head(hidden, task=task_of(labels))[0].backward()
        assert flops.get_total_flops() == (3 if trained else 2) * product
        assert recorder.largest <= max(ROWS * V, D * V)


def test_without_gradients_only_the_logits_are_computed() -> None:
    hidden, labels = inputs()
    expected, head = unfused(head_of(), hidden, labels), head_of()
    fuse_head(head)
    with torch.no_grad(), AllocationRecorder() as recorder, FlopCounterMode(display=False) as flops:
        found = head(hidden, task=task_of(labels))
    assert flops.get_total_flops() == 2 * B * T * D * V
    assert recorder.largest < B * T * V
    assert all(error(*pair) < 1e-6 for pair in zip(found, [each.double() for each in expected[:3]], strict=True))


def sharded(rank: int, size: int) -> list[Tensor]:
    """What `fused` returns, of this rank's columns; the gradient of the hidden states summed over the ranks."""
    group = group_of(rank, size)
    assert group is not None
    width = V // size
    first = width * dist.get_rank(group)
    hidden, labels = inputs()
    vocabulary = VocabularyShard(group, first)
    found = fused(
        head_of(bias=True, columns=slice(first, first + width)), hidden, task_of(labels, vocabulary=vocabulary)
    )
    dist.all_reduce(found[3], group=group)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_sharded_over_ranks_gives_the_same(ranks: Ranks, size: int) -> None:
    hidden, labels = inputs()
    expected = unfused(head_of(bias=True), hidden, labels)
    found = ranks.run(sharded, size)[:size]
    for index in range(4):
        assert all(error(each[index], expected[index].double()) < 1e-5 for each in found)
    for index in (4, 5):
        assert error(torch.cat([each[index] for each in found]), expected[index].double()) < 1e-5


def test_the_loss_and_its_gradient_compile_to_one_graph_for_all_chunks() -> None:
    hidden, labels = inputs()
    expected, model = unfused(head_of(), hidden, labels), nn.Sequential(head_of())
    fuse_head(model[0])
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    apply_compile(model, CompileSection(enabled=True, backend="aot_eager"), whole_graph=True)
    found = fused(model[0], hidden, task_of(labels))
    assert all(error(*pair) < 1e-6 for pair in zip(found, [each.double() for each in expected], strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="its head is a Bilinear"):
        fuse_head(nn.Bilinear(2, 2, 2))
    head = head_of()
    fuse_head(head)
    assert isinstance(head, FusedHead)
