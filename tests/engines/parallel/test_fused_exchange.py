"""Expert parallelism by kernels of other packages: our side of them, with kernels on gloo that stand in; refusals."""

from __future__ import annotations

import subprocess
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from foundation.errors import ConfigError
from pipeline.config.sections.run import MemorySection
from pipeline.engines.experimental import expert_kernels
from pipeline.engines.experimental.expert_kernels import DeepEP, HybridEP
from pipeline.engines.parallel.activation_checkpointing import apply_activation_checkpointing
from pipeline.engines.parallel.architecture_trial import RandomValues
from pipeline.engines.parallel.experts import AllToAll, apply_expert_parallel
from pipeline.engines.parallel.fused_exchange import FusedExchange, Handle
from pipeline.engines.parallel.fused_kernels import check_exchange, check_exchange_device, exchange_of
from pipeline.models.construction.materialize import materialize
from tests.engines.parallel.layouts import resolved
from tests.engines.parallel.ranks import Ranks
from tests.engines.parallel.test_experts import CHOICES, QWEN, E, group, layer, meta_of, results, routed


class SumsPerRank:
    """Kernels on gloo that do as `RowKernels` says: a rank adds up a token's rows before it sends them.

    Rows of an expert arrive in another order in each dispatch, as they do by the network.
    """

    dtype = torch.float32

    def __init__(self, ranks: Any) -> None:
        self._group, self._local = ranks, E // dist.get_world_size(ranks)
        self._rank = dist.get_rank(ranks)
        self._order = torch.Generator().manual_seed(self._rank)

    def dispatch(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        tokens, experts, scales = (torch.cat(self._gathered(each)) for each in (hidden, chosen, weights))
        flat = experts.reshape(-1)
        mine = ((flat // self._local) == self._rank).nonzero()[:, 0]
        mine = mine[torch.randperm(len(mine), generator=self._order)]
        mine = mine[flat[mine].argsort(stable=True)]
        counts = torch.bincount(flat[mine] - self._local * self._rank, minlength=self._local)
        handle = (mine, [len(each) for each in self._gathered(hidden)], chosen.shape[1])
        return tokens[mine // chosen.shape[1]], scales.reshape(-1)[mine], counts, handle

    def dispatch_again(self, hidden: Tensor, handle: Handle, *, rows: int) -> Tensor:
        mine, _, each = handle
        assert len(mine) == rows
        return torch.cat(self._gathered(hidden))[mine // each]

    def combine(self, rows: Tensor, weights: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
        mine, lengths, each = handle
        sums = rows.new_zeros(sum(lengths), rows.shape[1]).index_add(0, mine // each, rows)
        hidden = self._own(sum(self._gathered(sums)), lengths)
        if weights is None:
            return hidden, None
        flat = weights.new_zeros(sum(lengths) * each).index_copy(0, mine, weights)
        return hidden, self._own(sum(self._gathered(flat.view(-1, each))), lengths)

    def _own(self, tokens: Any, lengths: list[int]) -> Tensor:
        own: Tensor = tokens.split(lengths)[self._rank]
        return own

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, tensor.detach(), self._group)
        return found


def fused_layer(ranks: Any, *, kernels: Any) -> Any:
    return layer(ranks, exchange=AllToAll if kernels is None else partial(FusedExchange, kernels=kernels))


def both(rank: int, size: int, tokens: str, choice: str) -> list[tuple[list[Any], int]]:
    found = []
    for kernels in (SumsPerRank(group(rank, size)), None):
        module = fused_layer(group(rank, size), kernels=kernels)
        values = results(module, routed(rank, tokens, choice))
        found.append((values + [p.grad for p in module.parameters()], module.expert_exchange.largest))
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("tokens", "choice"),
    [
        ("even", "random"),
        ("a rank without tokens", "random"),
        ("even", "all to one rank"),
        ("no tokens at all", "random"),
    ],
)
def test_kernels_that_sum_per_rank_compute_what_the_all_to_all_does(
    ranks: Ranks, size: int, tokens: str, choice: str
) -> None:
    assert choice in CHOICES
    for (fused, most), (plain, most_plain) in ranks.run(both, size, tokens, choice):
        assert most == most_plain
        for ours, theirs in zip(fused, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def in_bf16(rank: int) -> list[float]:
    """Distances of results in bf16 from those of the all-to-all in fp32, over their norms."""
    kernels = SumsPerRank(group(rank, 4))
    kernels.dtype = torch.bfloat16
    found = []
    for module in (fused_layer(group(rank, 4), kernels=kernels), fused_layer(group(rank, 4), kernels=None)):
        values = results(module, routed(rank, "even", "random"))
        found.append(values + [p.grad for p in module.parameters()])
    assert [each.dtype for each in found[0]] == [torch.float32] * len(found[0])
    return [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(*found, strict=True)]


def test_rows_are_in_the_precision_of_the_kernels_and_results_in_that_of_the_model(ranks: Ranks) -> None:
    distances = [each for found in ranks.run(in_bf16) for each in found]
    assert max(distances) < 4 * 2**-8  # roundings of rows in, rows out, gradients in and out
    assert min(distances) > 0


def gradients_with(rank: int, mode: str) -> list[Tensor]:
    model = meta_of({**QWEN, "num_hidden_layers": 2})
    apply_activation_checkpointing(model, MemorySection(activation_checkpointing=mode))
    names = {id(p): name for name, p in model.named_parameters()}
    kernels = SumsPerRank(group(rank, 2))
    apply_expert_parallel(model, group(rank, 2), names=names, exchange=partial(FusedExchange, kernels=kernels))
    materialize(model, RandomValues(model), device=torch.device("cpu"))
    ids = torch.arange(8)[None] + rank
    model.train()(input_ids=ids % 16, use_cache=False).logits.square().sum().backward()
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


def test_a_recomputation_whose_rows_arrive_in_another_order_gives_the_same_gradients(ranks: Ranks) -> None:
    for kept, recomputed in zip(ranks.run(gradients_with, "none"), ranks.run(gradients_with, "full"), strict=True):
        for ours, theirs in zip(recomputed, kept, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


class Record:
    """DeepEP's `EPHandle`: attributes, of which the exchange knows two."""

    num_sms = 0

    def __init__(self, handle: Handle, counts: Tensor) -> None:
        (self.mine, self.lengths, self.each), self.num_sms = handle, 24
        self.num_recv_tokens_per_expert_list = counts.tolist()

    @property
    def handle(self) -> Handle:
        return self.mine, self.lengths, self.each


class ElasticBuffer(SumsPerRank):
    """DeepEP's, by its signatures: what the exchange gives and takes."""

    def __init__(
        self, ranks: Any, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int, deterministic: bool
    ) -> None:
        super().__init__(ranks)
        self.most = num_max_tokens_per_rank
        assert (hidden, num_topk, deterministic) == (QWEN["hidden_size"], QWEN["num_experts_per_tok"], True)

    def dispatch(  # type: ignore[override]
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        num_experts: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        handle: Record | None = None,
        do_expand: bool = False,
    ) -> tuple[Any, ...]:
        assert do_expand
        assert len(x) <= self.most
        if handle is not None:
            assert (type(handle), topk_idx, num_experts, num_sms) == (Record, None, None, 24)
            return self.dispatch_again(x, handle.handle, rows=len(handle.mine)), None, None, handle, None
        assert (num_experts, expert_alignment, num_sms) == (E, 1, 0)
        assert topk_idx is not None
        assert topk_weights is not None
        rows, weights, counts, found = super().dispatch(x, topk_idx, topk_weights)
        return rows, None, weights, Record(found, counts), None

    def combine(  # type: ignore[override]
        self, x: Tensor, handle: Record, topk_weights: Tensor | None = None
    ) -> tuple[Any, ...]:
        assert topk_weights is None or topk_weights.shape == (len(x),)
        return *super().combine(x, topk_weights, handle.handle), None


class HybridEPBuffer(SumsPerRank):
    """HybridEP's, by its signatures; an expert that a token did not choose is -1."""

    def __init__(self, *, group: Any, hidden_dim: int, max_num_of_tokens_per_rank: int, num_local_experts: int) -> None:
        super().__init__(group)
        self.most = max_num_of_tokens_per_rank
        assert (hidden_dim, num_local_experts, self.most % 64) == (QWEN["hidden_size"], self._local, 0)

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_permuted_tokens: int | None = None,
        handle: Handle | None = None,
    ) -> tuple[Any, ...]:
        assert len(hidden) == self.most
        if handle is not None:
            assert num_permuted_tokens is not None
            return self.dispatch_again(hidden, handle, rows=num_permuted_tokens), None, None, None, handle
        assert (num_of_experts_per_rank, num_permuted_tokens) == (self._local, None)
        assert routing_map is not None
        assert probs is not None
        chosen = torch.arange(E).expand(self.most, E).where(routing_map, -1)
        rows, weights, counts, handle = super().dispatch(hidden, chosen, probs)
        return rows, weights, None, counts.int(), handle

    def combine_with_unpermute(
        self, *, hidden: Tensor, probs: Tensor | None = None, handle: Handle
    ) -> tuple[Tensor, Tensor | None]:
        return super().combine(hidden, probs, handle)


PACKAGE = types.SimpleNamespace(
    ElasticBuffer=ElasticBuffer, HybridEPBuffer=HybridEPBuffer, EPHandle=Record, topk_idx_t=torch.int64
)


def through(rank: int, kernels: Any, tokens: int) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "deep_ep", PACKAGE)
        patched.setattr(kernels, "dtype", torch.float32)
        made = kernels(group(rank, 2), experts=E, tokens=tokens)
        module = fused_layer(group(rank, 2), kernels=made)
        values = results(module, routed(rank, "even", "random"))
    return values + [p.grad for p in module.parameters()]


@pytest.mark.parametrize(("kernels", "tokens"), [(DeepEP, 6), (HybridEP, 70)])
def test_a_package_of_the_reviewed_signatures_computes_what_the_all_to_all_does(
    ranks: Ranks, kernels: type, tokens: int
) -> None:
    plain = ranks.run(both, 2, "even", "random")
    for ours, (_, (theirs, _)) in zip(ranks.run(through, kernels, tokens), plain, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def run_with(name: str | None) -> Any:
    return resolved(
        world_size=4,
        model={"config": QWEN},
        bf16={"enabled": True},
        parallel={"ep": 2} if name is None else {"ep": 2, "ep_exchange": name},
        data={"sources": [{"path": "nowhere"}], "sequence_length": 8},
    )


SIZES = {"hidden_size": 256, "moe_intermediate_size": 16}
UNFIT = [
    ("deepep", {}, "multiples of 256 hidden_size, and model.layers.0.mlp.experts has 8\n  try: use a multiple of 256"),
    ("hybridep", {}, "multiples of 16 hidden_size"),
    ("hybridep", {**SIZES, "num_experts": 6}, "multiples of 4 experts, and .* has 6"),
    ("deepep", {**SIZES, "num_experts": 64, "num_experts_per_tok": 33}, "32 experts per token, and this model has 33"),
    ("deepep", SIZES, None),
    ("hybridep", SIZES, None),
    ("all_to_all", {}, None),
]


@pytest.mark.parametrize(("name", "changes", "why"), UNFIT)
def test_sizes_that_the_kernels_do_not_take_are_refused(name: str, changes: dict[str, Any], why: str | None) -> None:
    model = meta_of({**QWEN, **changes})
    if why is None:
        check_exchange(name, model, packages=False)
        return
    with pytest.raises(ConfigError, match=why) as refused:
        check_exchange(name, model, packages=False)
    assert refused.value.field == "parallel.ep_exchange"


def test_a_missing_package_is_refused_and_one_of_the_other_branch_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    model = meta_of({**QWEN, **SIZES})
    check_exchange("all_to_all", model)
    for folder in (None, tmp_path / "deep_ep"):
        if folder is not None:
            folder.mkdir()
            (folder / "__init__.py").write_text("raise AssertionError('imported')")
            (folder / "hybrid_ep_buffer.py").touch()
            check_exchange("hybridep", model)
        with pytest.raises(ConfigError, match=r"deep_ep is not installed, or .*\n  try: install it from github.com/"):
            check_exchange("deepep", model)


@pytest.mark.parametrize(
    ("name", "capability", "why"),
    [
        ("deepep", None, "no GPU\n  try: use all_to_all"),
        ("hybridep", (8, 0), "compute capability 8.0, and its kernels need 9.0"),
        ("deepep", (9, 0), None),
        (None, None, None),
    ],
)
def test_a_device_that_the_kernels_are_not_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str | None, capability: tuple[int, int] | None, why: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    device = torch.device("cpu" if capability is None else "cuda")
    if why is None:
        check_exchange_device(run_with(name), device)
        return
    with pytest.raises(ConfigError, match=why):
        check_exchange_device(run_with(name), device)


def test_layers_share_the_kernels_of_a_package_for_the_tokens_of_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, int]] = []
    monkeypatch.setattr(expert_kernels, "DeepEP", lambda _group, **sizes: made.append(sizes))
    monkeypatch.setattr(dist, "get_world_size", lambda _group: 2)
    make = exchange_of(run_with("deepep"))
    assert [type(make(layer, object(), experts=E)) for layer in "ab"] == [FusedExchange] * 2
    assert made == [{"experts": E, "tokens": 2 * 8}]
    assert exchange_of(run_with(None)) is AllToAll


@pytest.mark.integration
def test_nothing_imports_the_package_before_a_layer_runs() -> None:
    code = (
        "import sys, pipeline.engines.parallel.assemble;"
        " assert not any('deep_ep' in name or 'engines.experimental' in name for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
