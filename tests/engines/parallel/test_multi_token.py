"""Multi-token prediction on one process: its loss is that of a computation by hand, for five families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foundation.errors import ConfigError
from pipeline.config.sections.run import LossSection, MtpSection
from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.engines.parallel.acceptance import Acceptance
from pipeline.engines.parallel.decoder import Decoder, DecoderLayout, parameter_owners
from pipeline.engines.parallel.multi_token import training_loss
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.construction.initial_values import InitByName
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta
from tests.engines.parallel.layouts import resolved
from tests.models.architectures import batch_of, family_config

T, V, WEIGHT = 16, 512, 0.5
SCALED = {"path": "x", "parametrization": "completep", "base": {"hidden_size": 8}}
FAMILIES = ["deepseek_v3", "qwen3_next", "glm4_moe", "ernie4_5_moe", "llama"]


def decoder_of(kind: str, *, depth: int = 1, chunk: int | None = None) -> Decoder:
    """A decoder with modules and weights by name, on one process."""
    model = build_meta(family_config(kind), dtype=torch.float32, attn_implementation=ATTENTION_NAME, ahead=depth)
    materialize(model, InitByName(model, seed=1), device=torch.device("cpu"))
    return Decoder(model, DecoderLayout(chunk=chunk), parameter_owners(model)).train()


def section(*, depth: int = 1) -> LossSection:
    return LossSection(mtp=MtpSection(depth=depth, weight=WEIGHT))


def rms(states: Tensor, norm: Any, eps: float) -> Tensor:
    """RMSNorm by its formula; Qwen3-Next stores its weight minus 1."""
    zero_centered = type(norm).__name__.startswith("Qwen3Next")
    scaled = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)
    return scaled * (norm.weight + 1.0 if zero_centered else norm.weight)


def by_hand(decoder: Decoder, batch: MicroBatch, *, depth: int) -> list[float]:
    """Sums of the losses of further tokens of an unmasked batch, from transformers' layers and plain products."""
    causal: Any = decoder.causal
    causal.set_attn_implementation("eager")
    ids, base, eps = batch.input_ids, causal.model, causal.config.rms_norm_eps
    hidden = base(input_ids=ids, use_cache=False).last_hidden_state
    rotary = base.rotary_emb(hidden, torch.arange(T)[None])
    mask = torch.full((T, T), float("-inf")).triu(1)[None, None]
    sums = []
    for k in range(1, depth + 1):
        module = causal.mtp.get_submodule(str(k - 1))
        rows = torch.zeros((2, T, hidden.shape[-1]))
        for sample in range(2):
            for at in range(T):
                token = int(ids[sample, at + k]) if at + k < T else 0
                rows[sample, at] = causal.get_input_embeddings().weight[token]
        joined = torch.cat([rms(rows, module.enorm, eps), rms(hidden, module.hnorm, eps)], -1)
        output = module.layer(joined @ module.eh_proj.weight.T, attention_mask=mask, position_embeddings=rotary)
        output = output[0] if isinstance(output, tuple) else output
        hidden = output if isinstance(module.norm, torch.nn.Identity) else rms(output, module.norm, eps)
        logits, total = hidden @ causal.lm_head.weight.T, 0.0
        for sample in range(2):
            for at in range(T - k):
                label = int(batch.labels[sample, at + k])
                if label != IGNORE:
                    total += float(F.cross_entropy(logits[sample, at], torch.tensor(label)))
        sums.append(total)
    return sums


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_loss_is_that_of_a_computation_by_hand(kind: str) -> None:
    depth = 1 if kind == "qwen3_next" else 2
    decoder, batch = decoder_of(kind, depth=depth), batch_of(length=T)
    objective = training_loss(section(depth=depth))
    total, nats, mean, *each = (float(one.detach()) for one in decoder(batch.input_ids, batch, objective))
    plain = float(decoder(batch.input_ids, batch, training_loss(LossSection()))[0].detach())
    with torch.no_grad():
        expected = by_hand(decoder, batch, depth=depth)
    assert nats == pytest.approx(plain, rel=1e-6)
    assert (each or [mean]) == pytest.approx(expected, rel=2e-5)
    assert mean == pytest.approx(sum(expected) / depth, rel=2e-5)
    assert total == pytest.approx(nats + WEIGHT * mean, rel=1e-6)


def test_every_weight_learns_from_further_tokens_and_chunks_change_nothing() -> None:
    batch, found = batch_of(length=T), []
    for chunk in (None, 5):
        decoder = decoder_of("deepseek_v3", depth=2, chunk=chunk)
        decoder(batch.input_ids, batch, training_loss(section(depth=2)))[0].backward()
        found.append({name: p.grad for name, p in decoder.named_parameters() if "experts" not in name})
    assert all(grad is not None and grad.abs().max() > 0 for grad in found[0].values())
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [None, 5])
def test_the_acceptance_rate_is_that_of_greedy_tokens_compared_by_hand(chunk: int | None) -> None:
    decoder, batch = decoder_of("llama", depth=2, chunk=chunk), batch_of(length=T)
    kept: list[Tensor] = []
    head: Any = decoder.causal.get_output_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        # the first module's last layer copies the hidden state: some drafts are those of the model
        decoder.causal.get_submodule("mtp.0.eh_proj").weight.copy_(torch.eye(64).repeat(1, 2) / 2)  # type: ignore[operator, union-attr]
        head.weight.mul_(1.0 + torch.arange(V)[:, None] % 7)
        head.register_forward_pre_hook(lambda _module, args: kept.append(args[0]))
        acceptance = Acceptance()
        decoder.eval()(batch.input_ids, batch, acceptance)
        tokens, drafts = (torch.nn.functional.linear(each, head.weight).argmax(-1) for each in kept[:2])
    counted = batch.labels[:, 1:] != IGNORE
    equal = (tokens[:, 1:] == drafts[:, :-1]) & counted
    assert 0 < equal.sum() < counted.sum()
    assert acceptance.rate(torch.device("cpu")) == pytest.approx(float(equal.sum() / counted.sum()))


def test_a_target_in_another_document_counts_nothing() -> None:
    decoder, masked = decoder_of("deepseek_v3", depth=2), batch_of(length=T, borders=((5, 6), (5, 6)))
    objective = training_loss(section(depth=2))
    together = torch.stack(decoder(masked.input_ids, masked, objective))
    apart = torch.zeros_like(together)
    for start, end in ((0, 5), (5, 6), (6, 16)):
        own = MicroBatch(masked.input_ids[:, start:end], masked.labels[:, start:end])
        apart += torch.stack(decoder(own.input_ids, own, objective))
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def test_a_family_whose_files_have_one_module_is_refused_two() -> None:
    with pytest.raises(ConfigError, match=r"(?s)loss\.mtp\.depth = 2.*share one projection.*use 1"):
        decoder_of("qwen3_next", depth=2)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"loss": {"mtp": {"depth": 32}}}, r"loss\.mtp\.depth = 32.*a sequence has 32 tokens.*less than 32"),
        ({"quantization_aware": {"scheme": "W4A16"}}, r"loss\.mtp.*quantization_aware is given.*no scheme"),
        ({"parallel": {"pp": 2, "schedule": "zero_bubble"}}, r"parallel\.schedule = 'zero_bubble'.*use 1f1b"),
        (
            {"model": {"path": "x", "parametrization": "completep", "base": {"hidden_size": 8}}},
            r"model\.parametrization",
        ),
    ],
)
def test_a_config_that_the_modules_cannot_be_trained_with_is_refused(sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){why}"):
        resolved(world_size=2, **{"loss": {"mtp": {}}, **sections})
