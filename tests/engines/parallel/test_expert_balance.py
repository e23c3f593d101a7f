"""Balancing experts: the gradient of the auxiliary loss, the correction bias, refusals, and the log of a run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from foundation.errors import ConfigError
from pipeline.checkpoint.named_state import buffer_state
from pipeline.config.sections.run import MoeSection
from pipeline.data.micro_batch import IGNORE
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.architecture_limits import check_experts, check_layout
from pipeline.engines.parallel.architecture_trial import random_model
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.expert_balance import ExpertBalancer, make_balancer
from pipeline.models.routers import BIAS as BUFFER
from pipeline.models.routers import find_routers, routed
from pipeline.runtime.metrics.journal import read_rows
from tests import warm
from tests.conftest import launch, tiny_config, write_config
from tests.engines.comparison import FP32
from tests.engines.layout_cells import BIAS, SHARED_EXPERT
from tests.engines.parallel.layouts import resolved
from tests.models.architectures import assert_same, batch_of, family_config, gradients, meta_of, plain_decoder

COEFFICIENT = 0.3
CPU = torch.device("cpu")


def balanced(name: str, **fields: Any) -> tuple[Decoder, ExpertBalancer]:
    decoder = plain_decoder(name)
    balancer = make_balancer(MoeSection(**fields), decoder.causal, device=CPU)
    assert balancer is not None
    balancer.attach(decoder.causal)
    decoder.balancer = balancer
    return decoder.train(), balancer


def router_logits(decoder: Decoder) -> list[Tensor]:
    """Filled with the logits [N, E] of every router in the next forward pass."""
    found: list[Tensor] = []
    for router in find_routers(decoder.causal):
        router.module.register_forward_hook(lambda _m, _a, out, at=router.logits: found.append(out[at]))
    return found


def ended(balancer: ExpertBalancer, *, targets: int = 47, applied: bool = True) -> dict[str, float]:
    return balancer.parts(balancer.end_step(targets=targets, vetoed=not applied).tolist())


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_the_gradient_is_that_of_the_switch_loss_with_the_load_of_the_step_before(name: str) -> None:
    decoder, balancer = balanced(name, balance="aux_loss", aux_loss_coef=COEFFICIENT)
    batch, targets = batch_of(), int((batch_of().labels != IGNORE).sum())
    for _ in range(2):  # the first step's load is what the second balances
        gradients(decoder)
        balancer.begin_step(1.0 / targets)
        (decoder(batch.input_ids, batch, CrossEntropy())[0] / targets).backward()
        logged = ended(balancer, targets=targets)
    found = gradients(decoder)

    decoder.balancer = None
    plain = plain_decoder(name).train()
    logits = router_logits(plain)
    loss = plain(batch.input_ids, batch, CrossEntropy())[0] / targets
    counted = (batch.labels != IGNORE).flatten()
    routers = [router.module for router in find_routers(plain.causal)]
    layers = [switch_loss(each[counted], router) for each, router in zip(logits, routers, strict=True)]
    (loss + COEFFICIENT * torch.stack(layers).sum()).backward()
    assert_same(found, gradients(plain))
    assert logged["load_balance_loss"] == pytest.approx(float(torch.stack(layers).mean().detach()), rel=1e-5)


def switch_loss(logits: Tensor, router: nn.Module) -> Tensor:
    """Switch Transformer (arXiv:2101.03961), eq. 4-6, of one layer; the experts chosen as these routers choose them."""
    experts = logits.shape[1]
    chosen = logits.topk(router.top_k).indices
    load = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
    return experts * (load * logits.softmax(-1).mean(0)).sum()


GEMMA4 = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
# Gemma 4's router returns probabilities, Inkling's has rows for shared experts, LongCat's uses a layer's weight alone
SCORED = ("afmoe", "gemma4_text", "hunyuan_v1_moe", "inkling_text", "longcat_flash")


def family(kind: str, **fields: Any) -> nn.Module:
    return random_model(family_config(kind, **fields)).train()


@pytest.mark.parametrize("kind", SCORED)
def test_routers_with_their_weight_in_a_layer_get_the_gradient_of_their_probabilities(kind: str) -> None:
    model, inputs = family(kind, **(GEMMA4 if kind == "gemma4_text" else {})), list[Tensor]()
    section = MoeSection(balance="aux_loss", aux_loss_coef=COEFFICIENT)
    check_experts(section, model)
    balancer = make_balancer(section, model, device=CPU)
    assert balancer is not None
    balancer.attach(model)
    router = find_routers(model)[-1]  # no other router's loss depends on it
    for module in (router.module, router.scores):
        if module is not None:
            module.register_forward_pre_hook(lambda _module, args: inputs.append(args[0].detach()))
    load = torch.linspace(0.5, 1.5, router.experts) / router.experts
    balancer._load.copy_(load)
    balancer.begin_step(1.0)
    balancer.begin_micro_batch(torch.ones(1, 16, dtype=torch.bool))
    (0 * model(input_ids=torch.arange(16)[None] + 2, use_cache=False).logits.sum()).backward()
    found = (router.scores or router.module).weight
    weight = found.detach().clone().requires_grad_()
    scores = nn.functional.linear(inputs[-1].flatten(0, -2).float(), weight)[:, : router.experts]
    (COEFFICIENT * router.experts * scores.softmax(-1) * load).sum().backward()
    assert_same({"weight": found.grad}, {"weight": weight.grad})


@pytest.mark.parametrize("kind", ["afmoe", "ernie4_5_moe", "lfm2_moe", "longcat_flash"])
def test_the_correction_bias_that_is_found_chooses_the_experts(kind: str) -> None:
    model, chosen = family(kind), list[Tensor]()
    check_experts(MoeSection(balance="bias"), model)
    for router in find_routers(model):
        assert router.bias_owner is not None
        _, owner, key = router.bias_owner
        owner.get_buffer(key).view(-1)[1] = 100.0
        router.module.register_forward_hook(
            lambda _m, _a, out, at=router.logits: chosen.append(routed(out, at).indices)
        )
    model(input_ids=torch.arange(16)[None] + 2, use_cache=False)
    assert chosen
    assert all(bool((each == 1).any(1).all()) for each in chosen)


def test_a_router_that_also_scores_skipping_all_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="no router of experts that transformers names, with one output for each"):
        check_experts(MoeSection(balance="aux_loss"), family("zaya"))


def test_the_first_step_has_no_gradient_of_balance_and_logs_the_load() -> None:
    decoder, balancer = balanced("mixtral", balance="aux_loss", aux_loss_coef=COEFFICIENT)
    batch = batch_of()
    balancer.begin_step(1.0)
    decoder(batch.input_ids, batch, CrossEntropy())[0].backward()
    first = gradients(decoder)
    logged = ended(balancer, applied=False)
    assert logged["expert_max_violation"] > 0
    assert logged["expert_load_entropy"] < 1
    decoder.balancer = None
    plain = plain_decoder("mixtral").train()
    plain(batch.input_ids, batch, CrossEntropy())[0].backward()
    assert_same(first, gradients(plain), tolerance=1e-7)


def test_a_step_that_is_not_applied_leaves_the_balance_as_it_was() -> None:
    decoder, balancer = balanced("deepseek_v3", balance="bias", aux_loss_coef=COEFFICIENT)
    before = printed_state(decoder, balancer)
    route(decoder, balancer, applied=False)
    assert printed_state(decoder, balancer) == before
    route(decoder, balancer, applied=True)
    assert all(before[key] != value for key, value in printed_state(decoder, balancer).items())


def printed_state(decoder: Decoder, balancer: ExpertBalancer) -> dict[str, str]:
    return {key: str(value) for key, value in {**balancer.state_dict(), **buffer_state(decoder.causal)}.items()}


def route(decoder: Decoder, balancer: ExpertBalancer, *, applied: bool = True) -> dict[str, float]:
    """One forward and backward pass; returns what is logged."""
    batch = batch_of()
    balancer.begin_step(1.0)
    decoder(batch.input_ids, batch, CrossEntropy())[0].backward()
    gradients(decoder)
    return ended(balancer, applied=applied)


def test_an_evaluation_counts_no_tokens() -> None:
    decoder, balancer = balanced("mixtral", balance="aux_loss")
    decoder.eval()
    batch = batch_of()
    balancer.begin_step(1.0)
    with torch.no_grad():
        decoder(batch.input_ids, batch, CrossEntropy())
    assert ended(balancer) == {}


@torch.no_grad()
def skew(decoder: Decoder, *, by: float) -> None:
    """Makes every router prefer expert 0, whose logits grow by about `by`: its weights get the mean input's direction.

    The other logits are made small, so that tokens differ less than experts.
    """
    for router in find_routers(decoder.causal):
        inputs: list[Tensor] = []
        handle = router.module.register_forward_pre_hook(lambda _m, args, into=inputs: into.append(args[0]))
        decoder(batch_of().input_ids, batch_of(), CrossEntropy())
        handle.remove()
        mean, weight = inputs[0].flatten(0, -2).mean(0), router.module.weight
        weight *= 0.2
        weight[0] += by * mean / mean.square().sum()


def test_the_correction_bias_balances_a_skewed_router_and_stays_fp32() -> None:
    decoder, balancer = balanced("deepseek_v3", balance="bias", bias_update_rate=0.005)
    skew(decoder, by=1.0)
    first = route(decoder, balancer)
    for _ in range(120):  # at the end the bias swings by one update: at a rate of 0.02 that moves many of the 47 tokens
        last = route(decoder, balancer)
    assert last["expert_mean_violation"] < first["expert_mean_violation"] / 3
    biases = [buffer for name, buffer in decoder.causal.named_buffers() if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(bias.dtype == torch.float32 and bias.abs().max() > 0.02 for bias in biases)


def test_the_auxiliary_loss_balances_a_skewed_router() -> None:
    decoder, balancer = balanced("mixtral", balance="aux_loss", aux_loss_coef=1.0)
    skew(decoder, by=2.0)
    weights = [router.module.weight for router in find_routers(decoder.causal)]
    optimizer = torch.optim.AdamW(weights, lr=0.02, weight_decay=0.0)
    batch, rows = batch_of(), []
    for _ in range(120):  # after 40, models of three seeds in six were not balanced yet
        balancer.begin_step(1.0 / 47)
        (decoder(batch.input_ids, batch, CrossEntropy())[0] * 0.0).backward()  # the balance's gradient alone
        optimizer.step()
        gradients(decoder)
        rows.append(ended(balancer))
    assert rows[-1]["expert_mean_violation"] < rows[0]["expert_mean_violation"] / 3
    assert rows[-1]["load_balance_loss"] < rows[0]["load_balance_loss"]


@pytest.mark.parametrize(
    ("model", "balance", "message"),
    [
        (("llama", {}), "aux_loss", r"moe.balance = 'aux_loss'.*it has no experts"),
        (("mixtral", {}), "bias", r"moe.balance = 'bias'.*routers of mixtral have no correction bias.*use aux_loss"),
    ],
)
def test_an_impossible_balance_is_refused(model: tuple[str, dict[str, Any]], balance: str, message: str) -> None:
    run = resolved(world_size=1, moe={"balance": balance})
    with pytest.raises(ConfigError) as refused:
        check_layout(run, meta_of(model[0], **model[1]))
    assert re.search(message, " ".join(str(refused.value).split())), refused.value


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        ({"aux_loss_coef": 0.1}, r"moe.aux_loss_coef.*moe.balance is none"),
        ({"balance": "aux_loss", "bias_update_rate": 0.1}, r"moe.bias_update_rate.*moe.balance is aux_loss"),
    ],
)
def test_a_field_without_effect_is_refused(moe: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolved(world_size=1, moe=moe)
    assert re.search(message, " ".join(str(refused.value).split())), refused.value


@pytest.mark.integration
def test_a_run_logs_the_load_resumes_identically_and_exports_its_biases(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine="torch", moe={**BIAS["moe"], "aux_loss_coef": 0.1})
    config["model"]["config"] |= SHARED_EXPERT["model"]
    config["run"] |= {"steps": 6, "checkpoint_every": 3}
    config["scheduler"]["params"] = {"warmup_num_steps": 2, "decay_num_steps": 2}
    path = write_config(tmp_path / "run.json", config)
    launch("train.py", path, processes=2)
    rows_of = lambda: {row["step"]: row for row in read_rows(tmp_path / "run", kind="step")}  # noqa: E731
    rows = rows_of()
    assert {"load_balance_loss", "expert_max_violation", "expert_load_entropy", "idle_experts"} <= rows[6].keys()
    for newest in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(newest)
    launch("train.py", path, processes=1)
    for step, row in rows_of().items():
        for key in ("loss", "load_balance_loss", "expert_max_violation"):
            assert row[key] == pytest.approx(rows[step][key], rel=FP32), (step, key)
    assert warm.run("-m", "pipeline", "checkpoint", "verify", tmp_path / "run").returncode == 0
    assert warm.run("-m", "pipeline", "export", tmp_path / "run", tmp_path / "model").returncode == 0
    biases = [v for n, v in load_file(tmp_path / "model" / "model.safetensors").items() if n.endswith(BUFFER)]
    assert biases
    step = float(torch.tensor(0.02, dtype=biases[0].dtype))  # of the bias, as its dtype rounds it
    assert all(float(bias.abs().max()) >= step for bias in biases)
