"""Balances a mixture of experts over the global batch, with the same result in every layout, and measures its load.

For each layer, f_i is the fraction of a step's routed tokens that expert i got, and P_i its mean probability (softmax
of the router's logits). Both cover the target tokens of all micro-batches and ranks.

- Auxiliary loss: coefficient x sum over layers of E x sum_i f_i P_i, which is 1 per layer when the load is uniform.
  Source: Fedus et al. 2021, Switch Transformer (arXiv:2101.03961), eq. 4-6. Since f has no gradient, the previous
  step's f can be used. The loss is then a sum over tokens, like cross-entropy, and the same in every layout. See
  decision 0014.
- Correction bias: after each step, bias_i += rate x sign(mean load - load_i). Source: Wang et al. 2024
  (arXiv:2408.15664), algorithm 1.

The gradient of the auxiliary loss is added at the router, in the backward pass of its stage. So losses and pipeline
stages need not pass it on.

Shapes: L layers with experts in the full model, E experts, K per token, N tokens of a micro-batch on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.config.sections.run import MoeSection
from pipeline.engines.parallel.experts import ExpertExchange, exchanges
from pipeline.models.routers import Router, find_routers, routed
from pipeline.runtime.launch.host_copy import to_device

_METRICS = (
    "load_balance_loss",
    "expert_max_violation",
    "expert_mean_violation",
    "expert_load_entropy",
    "idle_experts",
)


class ExpertBalancer:
    """The experts' load and balance in one run; results and state are the same on every rank.

    Args:
        section: the config's `moe`.
        routers: the full model's routers.
        device: this rank's device.
        exchanged: whether tokens go to other ranks' experts (expert parallelism).
    """

    def __init__(
        self, section: MoeSection, routers: Sequence[Router], *, device: torch.device, exchanged: bool = False
    ) -> None:
        self._coefficient, self._rate = section.coefficient, section.bias_rate
        self._layers = {router.name: index for index, router in enumerate(routers)}
        self._experts, self._device = routers[0].experts, device
        shape = (len(routers), self._experts)
        self._load = torch.full(shape, 1.0 / self._experts, device=device)
        """Load f of the last applied step, fp32 [L, E]; uniform before the first."""
        self._sums = torch.zeros((2, *shape), dtype=torch.float64, device=device)
        """Routed tokens and sums of probabilities of the current step, fp64 [2, L, E]."""
        self._biases: dict[str, tuple[int, nn.Module, str, Tensor]] = {}
        self._tokens: Tensor | None = None
        self._scores: dict[int, Tensor] = {}
        self._scale = 0.0
        self._exchanges: list[ExpertExchange] | None = [] if exchanged else None

    def attach(self, causal: nn.Module) -> None:
        """Registers hooks on the routers of this rank's part of the model; parameters may still be replaced."""
        for router in find_routers(causal):
            index = self._layers[router.name]
            router.module.register_forward_hook(partial(self._observe, index, router.logits))
            if router.scores is not None:
                router.scores.register_forward_hook(partial(self._score, index))
            if self._rate and router.bias_owner is not None:
                name, owner, key = router.bias_owner
                self._biases[name] = (index, owner, key, torch.empty(0))
        if self._exchanges is not None:
            self._exchanges += exchanges(causal)

    def begin_step(self, scale: float) -> None:
        """Begins a step.

        Args:
            scale: factor on the gradient of a sum over tokens in this step's backward passes, as for the objective.
        """
        self._scale = scale
        self._sums.zero_()
        self._hold_biases()

    def begin_micro_batch(self, counted: Tensor) -> None:
        """Sets which tokens of the next forward pass count: bool, any shape, in the routers' order."""
        self._tokens = counted.flatten()

    @torch.no_grad()
    def end_step(self, *, targets: int, vetoed: Tensor | bool) -> Tensor:
        """Sums router statistics over all ranks; updates the state unless the step is vetoed. Collective, no host sync.

        Args:
            targets: number of target tokens in the whole step.
            vetoed: whether the weights were left unchanged, bool scalar. The state is then unchanged too.

        Returns:
            fp64 [6] on the device, [7] with expert parallelism: the values that `parts` names.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._sums)
        counts, probabilities = self._sums.unbind()
        seen = counts.sum(-1) > 0
        load = (counts / counts.sum(-1, keepdim=True).clamp(min=1)).where(seen[:, None], self._load.double())
        kept = torch.as_tensor(vetoed, device=self._device)
        self._update_biases(load, kept | ~seen)
        self._load.copy_(torch.where(kept, self._load.double(), load))
        metrics = self._metrics(load, probabilities / max(targets, 1), seen.double())
        return metrics if self._exchanges is None else torch.cat([metrics, self._most_rows(self._exchanges)])

    def _most_rows(self, own: Sequence[ExpertExchange]) -> Tensor:
        """Returns the step's largest number of rows for a rank's experts in a layer of a micro-batch, fp64 [1]."""
        most = to_device([max((each.largest for each in own), default=0)], self._device)
        for each in own:
            each.largest = 0
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return most

    @staticmethod
    def parts(values: Sequence[float]) -> dict[str, float]:
        """Names the values that `end_step` returned; empty if no token was routed.

        The names are `load_balance_loss` (mean over layers, without its coefficient; 1 is uniform),
        `expert_max_violation` and `expert_mean_violation` (largest load / mean load - 1, in the worst layer and as the
        mean over layers; source: arXiv:2408.15664, section 4.1), `expert_load_entropy` (mean over layers; 1 is
        uniform), `idle_experts` (experts of all layers without a token), and with expert parallelism
        `largest_expert_rows` (rows, one per token and expert, that the busiest rank got in a layer of a micro-batch).
        """
        metrics, layers, rows = values[: len(_METRICS)], values[len(_METRICS)], values[len(_METRICS) + 1 :]
        largest = {"largest_expert_rows": rows[0]} if rows else {}
        return {**dict(zip(_METRICS, metrics, strict=True)), **largest} if layers else {}

    @property
    def observed(self) -> bool:
        """Whether every router on this rank has routed a counted token since the step began."""
        return bool((self._sums[0].sum(-1) > 0).all())

    def state_dict(self) -> dict[str, NamedShard | Tensor]:
        """Returns a copy of the load under its checkpoint key, for `load_state_dict`.

        Converts the biases, which are persistent buffers, to fp32; must therefore be called before these are listed.
        """
        self._hold_biases()
        return {named_state.EXPERT_LOAD: self._load.cpu().clone()} if self._coefficient else {}

    def load_state_dict(self, state: Mapping[str, NamedShard | Tensor]) -> None:
        """Restores the state from a dict made by `state_dict`, into which a checkpoint has been read."""
        saved = state.get(named_state.EXPERT_LOAD)
        if isinstance(saved, Tensor):
            self._load.copy_(saved)

    def _hold_biases(self) -> None:
        """Converts the biases to fp32: an engine may have converted them to bf16, which would round updates away."""
        for name, (index, owner, key, held) in self._biases.items():
            current = owner._buffers[key]
            assert current is not None
            if current is not held:
                bias = held if held.numel() else current.detach().to(self._device, torch.float32).clone()
                owner._buffers[key] = bias
                self._biases[name] = (index, owner, key, bias)

    def _update_biases(self, load: Tensor, kept: Tensor) -> None:
        for index, _, _, bias in self._biases.values():
            change = torch.sign(1.0 / self._experts - load[index]).float()
            bias.add_(torch.where(kept[index], 0.0, change), alpha=self._rate)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it changes the state of the balancer
    def _score(self, index: int, _module: nn.Module, _args: Any, output: Tensor) -> None:
        """Forward hook of the linear layer of a router's logits."""
        self._scores[index] = output

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it changes the state of the balancer
    def _observe(self, index: int, logits_at: int, module: nn.Module, _args: Any, output: Any) -> Any:
        """Forward hook of a router: counts its tokens, and adds the gradient of the auxiliary loss."""
        found, scores = routed(output, logits_at), self._scores.pop(index, None)
        if found is not None and scores is not None and scores.numel() == found.logits.numel():
            found = replace(found, logits=scores.view_as(found.logits))
        if found is None or self._tokens is None or not (module.training and torch.is_grad_enabled()):
            return None
        # the tokens of a recomputation (activation checkpointing) have been counted already
        if torch._C._current_graph_task_id() == -1:
            self._count(index, found.logits.detach(), found.indices)
        if not self._coefficient:
            return None
        # f - 1/E instead of f gives the same gradient, as probabilities sum to 1, with less rounding error
        factors = (self._load[index] - 1.0 / self._experts) * (self._coefficient * self._experts * self._scale)
        weights = _BalancingGradient.apply(found.weights, found.logits, self._tokens, factors)
        return (*output[: found.weights_at], weights, *output[found.weights_at + 1 :])

    @torch.no_grad()
    def _count(self, index: int, logits: Tensor, indices: Tensor) -> None:
        assert self._tokens is not None
        assert len(self._tokens) == len(logits), (len(self._tokens), len(logits))
        tokens = self._tokens.to(torch.float64)
        self._sums[0, index].scatter_add_(0, indices.flatten(), tokens.repeat_interleave(indices.shape[1]))
        self._sums[1, index] += (logits.float().softmax(-1) * tokens[:, None].float()).sum(0)

    def _metrics(self, load: Tensor, probabilities: Tensor, seen: Tensor) -> Tensor:
        """Returns metrics over the layers that have routed tokens, and the number of these layers, fp64 [6]."""
        layers = seen.sum()

        def mean(values: Tensor) -> Tensor:
            return (values * seen).sum() / layers.clamp(min=1)

        violation = load.amax(-1) * self._experts - 1.0
        entropy = -(load * load.clamp(min=1e-30).log()).sum(-1) / math.log(max(self._experts, 2))
        idle = ((load == 0).sum(-1) * seen).sum()
        balance = self._experts * (load * probabilities).sum(-1)
        worst = violation.where(seen > 0, -math.inf).max()
        return torch.stack([mean(balance), worst, mean(violation), mean(entropy), idle, layers])


def make_balancer(
    section: MoeSection, model: nn.Module, *, device: torch.device, exchanged: bool = False
) -> ExpertBalancer | None:
    """Makes the balancer of a model; None for a model without observable routers.

    Args:
        section: the config's `moe`.
        model: the full model, on meta.
        device: this rank's device.
        exchanged: whether tokens go to other ranks' experts (expert parallelism).
    """
    routers = find_routers(model)
    if not routers or len({router.experts for router in routers}) > 1:
        return None
    return ExpertBalancer(section, routers, device=device, exchanged=exchanged)


class _BalancingGradient(torch.autograd.Function):
    """Returns the weights of the chosen experts unchanged; adds the gradient of the auxiliary loss to the logits'.

    Tokens and factors are attributes, not saved tensors: activation checkpointing recomputes saved tensors in a
    backward pass, when another micro-batch may be current.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, logits: Tensor, tokens: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.tokens, ctx.factors = tokens, factors
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        probabilities = logits.float().softmax(-1)
        # the gradient of sum_i factor_i p_i: p_j (factor_j - sum_i factor_i p_i)
        mean = (probabilities * ctx.factors).sum(-1, keepdim=True)
        gradient = probabilities * (ctx.factors - mean) * ctx.tokens[:, None]
        return grads[0], gradient.to(logits.dtype), None, None
