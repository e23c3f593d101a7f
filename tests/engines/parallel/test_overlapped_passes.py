"""Two passes in turns: what is between begin and end of an exchange, the same numbers, and an error in either pass."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foundation.errors import HeadraceError
from pipeline.engines.parallel import experts
from pipeline.engines.parallel.activation_checkpointing import restores_results
from pipeline.engines.parallel.collectives import functional
from pipeline.engines.parallel.experts import expert_modules
from pipeline.engines.parallel.overlapped_passes import OverlappedPasses
from pipeline.models.grouped_products import grouped_product
from tests.engines.comparison import EXPERTS
from tests.engines.layout_cells import DEEPSEEK
from tests.engines.layout_worker import first_states, make_engine, resolved, step_batch
from tests.engines.parallel.ranks import WORLD, Ranks

MICRO_BATCHES = 2  # of SAMPLES over dp 4
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default)


class HandsOver(torch.autograd.Function):
    """An exchange that takes no time, in both passes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, passes: OverlappedPasses, log: list[str], name: str) -> Tensor:
        ctx.passes, ctx.log, ctx.name = passes, log, name
        return exchanged(values, passes, log, f"forward {name}")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged(grads[0], ctx.passes, ctx.log, f"backward {ctx.name}"), None, None, None


def exchanged(values: Tensor, passes: OverlappedPasses, log: list[str], name: str) -> Tensor:
    log.append(f"begin {name}")
    passes.hand_over()
    log.append(f"end {name}")
    return values.clone()


def two_layers(passes: OverlappedPasses, log: list[str]) -> Tensor:
    values = torch.ones(2, requires_grad=True)
    return HandsOver.apply(HandsOver.apply(values, passes, log, "0"), passes, log, "1").sum()  # type: ignore[no-any-return]


def test_the_turn_is_handed_over_at_each_exchange_and_the_backward_pass_begins() -> None:
    log: list[str] = []
    passes = OverlappedPasses()
    loss = two_layers(passes, log)
    assert log == ["begin forward 0", "end forward 0", "begin forward 1", "end forward 1"]
    log.clear()
    following = passes.run(lambda: two_layers(passes, log), loss.backward)
    assert log == [
        "begin backward 1",
        "begin forward 0",
        "end backward 1",
        "begin backward 0",
        "end forward 0",
        "begin forward 1",
        "end backward 0",
        "end forward 1",
    ]
    log.clear()
    following.backward()
    assert log == ["begin backward 1", "end backward 1", "begin backward 0", "end backward 0"]


@pytest.mark.parametrize("ended", ["forward", "backward"])
def test_a_pass_whose_other_has_ended_waits_at_once(ended: str) -> None:
    log: list[str] = []
    passes = OverlappedPasses()
    loss = two_layers(passes, log)
    log.clear()
    if ended == "forward":
        passes.run(lambda: log.append("forward"), loss.backward)
        assert log == ["begin backward 1", "forward", "end backward 1", "begin backward 0", "end backward 0"]
    else:
        passes.run(lambda: two_layers(passes, log), lambda: log.append("backward"))
        assert log == ["backward", "begin forward 0", "end forward 0", "begin forward 1", "end forward 1"]


@pytest.mark.parametrize("kind", [HeadraceError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_an_error_of_either_pass_ends_both_and_is_raised(failing: str, kind: type[BaseException]) -> None:
    log: list[str] = []
    passes = OverlappedPasses()
    loss = two_layers(passes, log)
    log.clear()

    def fails(*_args: Any) -> None:
        raise kind(f"in the {failing} pass")

    def forward() -> Tensor:
        found = two_layers(passes, log)
        if failing == "forward":
            fails()
        return found

    def backward() -> None:
        loss.backward()
        if failing == "backward":
            fails()

    with pytest.raises(kind, match=f"in the {failing} pass"):
        passes.run(forward, backward)
    assert [each.name for each in threading.enumerate() if each.name == "backward pass"] == []
    log.clear()
    two_layers(passes, log)  # a hand-over without another pass
    assert len(log) == 4


class Seen(TorchDispatchMode):
    """Counts products of each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products[own_pass()] += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def own_pass() -> str:
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


def run_of(more: dict[str, Any], *, overlap: bool) -> Any:
    config = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 1,
        "model": EXPERTS,
        "parallel": {"ep": 2, "ep_overlap": overlap},
        **more,
    }
    return resolved(config, processes=WORLD)


def exchanges_with_work_between(_rank: int, more: dict[str, Any]) -> tuple[int, int]:
    """Exchanges of rows in a step, and those with a product of the other pass between begin and end."""
    run = run_of(more, overlap=True)
    engine = make_engine(run)
    begun, between = [], []
    with pytest.MonkeyPatch.context() as patched, Seen() as seen:

        def begin(rows: Tensor, *args: Any) -> Tensor:
            if rows.ndim == 2 and rows.is_floating_point() and not restores_results():
                begun.append((own_pass(), Counter(seen.products)))
            return functional.all_to_all_single(rows, *args)

        def end(rows: Tensor) -> Tensor:
            if rows.ndim == 2 and rows.is_floating_point() and begun:
                own = own_pass()
                number = next((i for i, each in enumerate(begun) if each[0] == own), None)
                if number is not None:
                    other = {"forward": "backward", "backward": "forward"}[own]
                    between.append(seen.products[other] - begun.pop(number)[1][other])
            return functional.wait_tensor(rows)

        patched.setattr(experts, "functional", SimpleNamespace(all_to_all_single=begin, wait_tensor=end))
        engine.train_step(step_batch(run, 1), lr=0.01)
    return len(between), sum(each > 0 for each in between)


@pytest.mark.parametrize(
    ("mode", "exchanges", "beside"),
    [
        ("none", 4, 4),
        ("selective", 4, 4),
        # the forward pass has two exchanges of a layer and ends first; of the four of the backward pass, nothing but a
        # sum is between the second and the third, once in two layers of the forward pass
        ("full", 6, 4 - 1 / 2 + 1 / 4),
    ],
)
def test_every_exchange_of_a_pair_has_work_of_the_other_pass_between_begin_and_end(
    ranks: Ranks, mode: str, exchanges: int, beside: float
) -> None:
    more = {"memory": {"activation_checkpointing": mode}}
    layers = run_of(more, overlap=True).config.model.config["num_hidden_layers"]
    found = ranks.run(exchanges_with_work_between, more)
    assert layers == 4
    assert found == [(layers * MICRO_BATCHES * exchanges, layers * beside * (MICRO_BATCHES - 1))] * WORLD


IN_A_PIPELINE = {"parallel": {"pp": 2, "ep": 2, "schedule": "dualpipev", "ep_overlap": True}}


def test_every_exchange_of_a_pair_of_dualpipev_has_work_of_the_other_pass_between_begin_and_end(ranks: Ranks) -> None:
    micro_batches = run_of(IN_A_PIPELINE, overlap=True).batch.accumulation
    found = ranks.run(exchanges_with_work_between, IN_A_PIPELINE)
    # a layer has two exchanges in each pass; of 2 n forward passes of a rank 2 n - 3 pp + 1 are in pairs (`rank_time`)
    pairs = 2 * micro_batches - 3 * 2 + 1
    assert found == [(micro_batches * 2 * 4, pairs * 4)] * WORLD


def states(_rank: int, more: dict[str, Any], overlap: bool) -> tuple[list[float], dict[str, Tensor]]:
    run = run_of(more, overlap=overlap)
    engine = make_engine(run)
    losses = [engine.train_step(step_batch(run, step), lr=0.01).loss for step in (1, 2)]
    return losses, dict(first_states(engine))


@pytest.mark.parametrize(
    "more",
    [
        {"bf16": {"enabled": True}, "moe": {"balance": "aux_loss"}, "memory": {"activation_checkpointing": "full"}},
        {
            **DEEPSEEK,
            "memory": {"activation_checkpointing": "selective"},
            "gradient_accumulation_steps": 4,
            "train_batch_size": 16,
        },
    ],
)
def test_losses_and_gradients_are_those_of_passes_one_after_the_other_to_the_bit(
    ranks: Ranks, more: dict[str, Any]
) -> None:
    apart, beside = (ranks.run(states, more, overlap) for overlap in (False, True))
    for (losses, gradients), (other_losses, other_gradients) in zip(apart, beside, strict=True):
        assert losses == other_losses
        assert all(torch.equal(gradient, other_gradients[name]) for name, gradient in gradients.items())


def failed(_rank: int, failing: str) -> tuple[str, list[str], int]:
    """The text of a step's error, its notes, and the threads that are left of it."""
    run = run_of({}, overlap=True)
    engine = make_engine(run)
    threads = threading.active_count()
    [_, (_, module), *_] = expert_modules(engine.decoders[0])
    calls = []

    def fail(*_args: Any) -> None:
        raise torch.OutOfMemoryError(f"in the {failing} pass")

    def product(*args: Any) -> Tensor:
        calls.append(args)
        if failing == "forward" and len(calls) > MICRO_BATCHES:  # two products of each layer and micro-batch
            fail()
        found = grouped_product(*args)
        if failing == "backward":
            found.register_hook(fail)
        return found

    module.expert_exchange.product = product
    try:
        engine.train_step(step_batch(run, 1), lr=0.01)
    except torch.OutOfMemoryError as error:
        return str(error), getattr(error, "__notes__", []), threading.active_count() - threads
    return "", [], 0


@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_an_error_in_a_layer_of_either_pass_ends_the_step_with_its_own_text(ranks: Ranks, failing: str) -> None:
    for text, notes, threads in ranks.run(failed, failing):
        assert text == f"in the {failing} pass"
        assert threads == 0
        assert any("its experts on this rank got" in note for note in notes) == (failing == "forward")
