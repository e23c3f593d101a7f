"""Expert parallelism of one layer: whatever the routing, the experts of several ranks compute what one process does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from foundation.errors import ConfigError
from pipeline.config.sections.run import MemorySection
from pipeline.engines.parallel import experts
from pipeline.engines.parallel.activation_checkpointing import apply_activation_checkpointing
from pipeline.engines.parallel.architecture_trial import RandomValues
from pipeline.engines.parallel.experts import (
    NAME,
    AllToAll,
    apply_expert_parallel,
    attach_exchange,
    check_expert_parallel,
    exchanges,
    expert_modules,
)
from pipeline.engines.sizes.footprint import footprint_of
from pipeline.engines.sizes.traffic import TrafficLayout, expert_exchanges
from pipeline.models import grouped_products
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta
from pipeline.models.grouped_products import zero_idle_experts
from tests.engines.parallel.layouts import resolved
from tests.engines.parallel.ranks import WORLD, Ranks, group_of

D, E, K = 8, 8, 2
QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": D,
    "intermediate_size": 16,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 16,
    "num_experts": E,
    "num_experts_per_tok": K,
}
TOKENS = {"even": (6, 6, 6, 6), "a rank without tokens": (5, 0, 7, 3), "no tokens at all": (0, 0, 0, 0)}
CHOICES = {
    "random": lambda n, g: torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(n)] or [torch.zeros(K)]),
    "all to one rank": lambda n, _g: torch.arange(K).repeat(n, 1),
    "all to the last expert, twice": lambda n, _g: torch.full((n, K), E - 1),
}


@cache
def group(rank: int, size: int) -> Any:
    return group_of(rank, size)


def meta_of(config: dict[str, Any]) -> Any:
    return build_meta(AutoConfig.for_model(**config), dtype=torch.float32, attn_implementation="eager")


def routed(rank: int, tokens: str, choice: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    count = TOKENS[tokens][rank]
    hidden, weights = torch.randn(count, D, generator=generator), torch.rand(count, K, generator=generator)
    chosen = CHOICES[choice](count, generator)[:count].long()
    return hidden.requires_grad_(), chosen, weights.requires_grad_()


def layer(ranks: Any, *, exchange: Any = AllToAll) -> Any:
    model = meta_of(QWEN)
    [(_, module)] = expert_modules(model)
    names = {id(p): name for name, p in module.named_parameters()}
    full = {
        name: torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
        for name, p in module.named_parameters()
    }
    boxes = apply_expert_parallel(model, ranks, names=names, exchange=exchange) if ranks else {}
    for name, value in full.items():
        own = value[boxes[name].slices].clone() if boxes else value
        setattr(module, name, torch.nn.Parameter(own))
    return module


def results(module: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    hidden, chosen, weights = inputs
    out = module(hidden, chosen, weights)
    if not out.requires_grad:  # transformers' own loop, of no token
        return [out, torch.zeros_like(hidden), torch.zeros_like(weights)]
    (out * torch.arange(1, D + 1)).sum().backward()
    return [out.detach(), hidden.grad, weights.grad]  # type: ignore[list-item]


def on_ranks(rank: int, size: int, tokens: str, choice: str) -> dict[str, Any]:
    module = layer(group(rank, size))
    found = results(module, routed(rank, tokens, choice))
    exchange: Any = module.expert_exchange
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"found": found, "gradients": gradients, "largest": exchange.largest}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("choice", CHOICES)
def test_ranks_compute_what_one_process_does(ranks: Ranks, size: int, tokens: str, choice: str) -> None:
    found = ranks.run(on_ranks, size, tokens, choice)
    reference = layer(None)
    reference.config._experts_implementation = "eager"
    expected = [results(reference, routed(rank, tokens, choice)) for rank in range(WORLD)]
    for rank in range(WORLD):
        for ours, theirs in zip(found[rank]["found"], expected[rank], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    local = E // size
    for name, parameter in reference.named_parameters():
        full = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for expert in range(E):
            held = [found[rank]["gradients"][name] for rank in range(WORLD) if rank % size == expert // local]
            own = sum(torch.zeros(1) if g is None else g[expert % local] for g in held)
            torch.testing.assert_close(own.expand_as(full[expert]), full[expert], rtol=1e-5, atol=1e-4)


def test_the_rows_of_the_busiest_rank_are_known(ranks: Ranks) -> None:
    found = ranks.run(on_ranks, 4, "even", "all to one rank")
    assert [each["largest"] for each in found] == [6 * WORLD * K, 0, 0, 0]


def exchanges_of(rank: int, mode: str) -> tuple[int, int]:
    model = meta_of({**QWEN, "num_hidden_layers": 2})
    apply_activation_checkpointing(model, MemorySection(activation_checkpointing=mode))
    names = {id(p): name for name, p in model.named_parameters()}
    apply_expert_parallel(model, group(rank, 2), names=names)
    materialize(model, RandomValues(model), device=torch.device("cpu"))
    with CommDebugMode() as collectives, HostReads() as reads:
        model.train()(input_ids=torch.arange(8)[None], use_cache=False).logits.sum().backward()
    return collectives.get_total_counts(), reads.count


@pytest.mark.parametrize(("mode", "exchanged", "reads"), [("none", 5, 1), ("selective", 5, 1), ("full", 8, 2)])
def test_only_full_activation_checkpointing_exchanges_and_reads_sizes_again(
    ranks: Ranks, mode: str, exchanged: int, reads: int
) -> None:
    assert ranks.run(exchanges_of, mode) == [(2 * exchanged, 2 * reads)] * WORLD  # of two layers


class HostReads(TorchDispatchMode):
    """Counts the copies of sizes to the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.headrace.host_sizes.default
        return func(*args, **(kwargs or {}))


def sent_bytes(rank: int, size: int, choice: str) -> int:
    """Bytes of rows given to all-to-alls, forward and backward."""
    given: list[int] = []
    real = experts._all_to_all

    def counted(rows: Tensor, *args: Any) -> Tensor:
        given.append(rows.numel() * rows.element_size())
        return real(rows, *args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(experts, "_all_to_all", counted)
        on_ranks(rank, size, "even", choice)
    return sum(given)


@pytest.mark.parametrize("choice", ["random", "all to one rank"])
def test_the_bytes_of_the_exchange_are_those_of_the_formula(ranks: Ranks, choice: str) -> None:
    length = TOKENS["even"][0]
    run = resolved(
        world_size=WORLD,
        model={"config": QWEN},
        parallel={"ep": WORLD},
        data={"sources": [{"path": "nowhere"}], "sequence_length": length},
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=1,
    )
    footprint = footprint_of(run, meta_of(QWEN))
    assert footprint is not None
    least = expert_exchanges(TrafficLayout(run, footprint.ranks[0], footprint.widths))
    assert least == length * 4 * K * D * 4
    # what a rank gets above the mean, another one does not
    assert sum(ranks.run(sent_bytes, WORLD, choice)) == WORLD * least


@pytest.mark.parametrize(
    ("changes", "ep", "why"),
    [
        ({"model_type": "llama", "hidden_size": 32}, 2, "it is a dense model"),
        ({}, 3, "it does not divide the 8 experts of model.layers.0.mlp.experts"),
        ({"moe_intermediate_size": 6}, 2, "multiples of 4, and model.layers.0.mlp.experts.down_proj is .8, 6."),
        ({"model_type": "jetmoe", "hidden_size": 32}, 2, "through its interface of experts"),
    ],
)
def test_what_cannot_be_split_is_refused(changes: dict[str, Any], ep: int, why: str) -> None:
    other = {key: QWEN[key] for key in ("hidden_size", "vocab_size", "num_hidden_layers")}
    config = (other if "model_type" in changes else QWEN) | changes
    with pytest.raises(ConfigError, match=why):
        check_expert_parallel(meta_of(config), ep=ep)


@pytest.mark.parametrize(
    ("experts", "ranks", "remedy"), [(6, 4, "use 2"), (6, 12, "use 3"), (3, 4, "remove parallel.ep")]
)
def test_the_size_that_is_named_divides_the_experts_and_the_ranks(experts: int, ranks: int, remedy: str) -> None:
    model = meta_of(QWEN | {"num_experts": experts, "num_experts_per_tok": 2})
    with pytest.raises(ConfigError) as refused:
        check_expert_parallel(model, ep=4, ranks=ranks)
    assert refused.value.remedy.startswith(remedy)


def test_the_config_that_other_models_share_stays_as_it_is() -> None:
    model = meta_of(QWEN)
    apply_expert_parallel(model, None, names={})
    assert len(exchanges(model)) == 1
    assert model.config._experts_implementation != NAME


def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `grouped_mm` as on Blackwell: the product of a group without rows is not written (pytorch#172439)."""
    product = torch.nn.functional.grouped_mm

    class Unwritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
            ctx.save_for_backward(left, right, offs)
            found = product(left, right, offs=offs)
            idle = offs.diff(prepend=offs.new_zeros(1)) == 0
            return found.masked_fill(idle[:, None, None], torch.nan) if right.ndim == 2 else found

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
            left, right, offs = ctx.saved_tensors
            to_right = Unwritten.apply(left.mT, grads[0], offs)
            return product(grads[0], right.mT, offs=offs), to_right, None

    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda left, right, *, offs: Unwritten.apply(left, right, offs)
    )


@pytest.mark.parametrize("ours", [True, False], ids=["our exchange", "transformers"])
def test_gradients_of_experts_without_rows_are_zero_where_the_kernel_leaves_them(
    ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwritten(monkeypatch)

    def gradients(*, exact: bool) -> list[Tensor]:
        module = layer(None)
        if ours:
            attach_exchange(module, "experts", None)
        elif exact:
            zero_idle_experts(module)
        chosen = torch.tensor([[0, 5], [5, 6], [0, 6]])
        module(torch.ones(3, D), chosen, torch.full((3, K), 0.5)).square().sum().backward()
        return [module.gate_up_proj.grad, module.down_proj.grad]

    used = torch.zeros(E, dtype=torch.bool).scatter(0, torch.tensor([0, 5, 6]), True)
    for each in gradients(exact=True):
        assert (each[~used] == 0).all()
        assert (each[used] != 0).any(-1).any(-1).all()
    monkeypatch.setattr(grouped_products, "leaves_idle_experts", lambda _device: False)
    assert all(each[~used].isnan().all() for each in gradients(exact=False))  # the kernel's own


def test_exact_gradients_of_idle_experts_are_part_of_a_compiled_graph() -> None:
    module = layer(None)
    zero_idle_experts(module)
    arguments = torch.ones(3, D), torch.tensor([[0, 5], [5, 6], [0, 6]]), torch.full((3, K), 0.5)
    compiled = torch.compile(module.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), module(*arguments))
