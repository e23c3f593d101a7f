"""QK-Clip by hand: eager attention's largest logits, and the rows that they scale after the same update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pipeline.data.micro_batch import MicroBatch, StepBatch
from pipeline.engines.base import NO_UPDATE, StepOutcome
from tests.engines.layout_worker import LENGTH, MODEL, VOCABULARY, make_engine, resolved, step_batch

LR, HEADS, KEY_HEADS, SIZE = 3e-3, 4, 2, 8
MUON: dict[str, Any] = {"type": "Muon", "params": {"lr": LR, "weight_decay": 0.1}}
CLIPPED = {**MUON, "params": {**MUON["params"], "qk_clip": 0.05}}
BIASES = {"attention_bias": True}


def engine_of(kind: str, optimizer: dict[str, Any], **fields: Any) -> Any:
    case = {"engine": kind, "optimizer": optimizer, "model": BIASES, "train_micro_batch_size_per_gpu": 2, **fields}
    return make_engine(resolved(case, processes=1))


def steps(*, packed: bool) -> StepBatch:
    """A step of four micro-batches; of packed ones each sample is two documents."""
    step = step_batch(resolved({"train_micro_batch_size_per_gpu": 2}, processes=1), 1)
    if not packed:
        return step
    half = torch.arange(LENGTH) >= LENGTH // 2
    positions = torch.arange(LENGTH) % (LENGTH // 2)
    each = {"positions": positions.expand(2, -1).contiguous(), "documents": half.int().expand(2, -1).contiguous()}
    return replace(step, micro_batches=[replace(micro, **each) for micro in step.micro_batches])


def weights(engine: Any) -> dict[str, Tensor]:
    state = engine.state()
    return {
        key.removeprefix("weight/"): torch.cat([part.flatten() for part in shard.parts.values()]).view(shard.shape)
        for key, shard in state.items()
        if key.startswith("weight/")
    }


@torch.no_grad()
def largest_by_hand(values: dict[str, Tensor], batches: list[MicroBatch]) -> list[Tensor]:
    """Layer -> [K], from the projections of Hugging Face's eager model and all of their products."""
    config = AutoConfig.for_model(**{**MODEL, **BIASES, "vocab_size": VOCABULARY})
    from transformers import LlamaForCausalLM  # noqa: PLC0415  imports the model for seconds

    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    model.load_state_dict(values, strict=False)
    found = [torch.full((KEY_HEADS,), -torch.inf) for _ in model.model.layers]
    for batch in batches:
        documents = torch.zeros_like(batch.input_ids) if batch.documents is None else batch.documents
        positions = torch.arange(LENGTH)[None] if batch.positions is None else batch.positions
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & (documents[:, :, None] == documents[:, None, :])
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
        states = model(
            input_ids=batch.input_ids, position_ids=positions, attention_mask=mask, output_hidden_states=True
        ).hidden_states
        for layer, hidden in enumerate(states[:-1]):
            decoder = model.model.layers[layer]
            normed = decoder.input_layernorm(hidden)
            query, key = (
                projection(normed).unflatten(-1, (-1, SIZE)).transpose(1, 2)
                for projection in (decoder.self_attn.q_proj, decoder.self_attn.k_proj)
            )
            query, key = apply_rotary_pos_emb(query, key, *model.model.rotary_emb(hidden, positions))
            logits = query.unflatten(1, (KEY_HEADS, -1)) @ key[:, :, None].mT / SIZE**0.5
            most = logits.masked_fill(~seen[:, None, None], -torch.inf).amax((0, 2, 3, 4))
            found[layer] = torch.maximum(found[layer], most)
    return found


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("kind", ["reference", "torch"])
def test_a_step_is_one_without_it_and_then_the_rows_of_each_head_over_the_threshold(kind: str, packed: bool) -> None:
    clipped, plain, step = engine_of(kind, CLIPPED), engine_of(kind, MUON), steps(packed=packed)
    largest = largest_by_hand(weights(plain), step.micro_batches)
    expected_count = sum(int((each > 0.05).sum()) for each in largest)
    assert 0 < expected_count < KEY_HEADS * len(largest)  # some are, others are not
    result, _ = (engine.train_step(step, lr=LR) for engine in (clipped, plain))
    assert result.parts["largest_attention_logit"] == pytest.approx(float(torch.stack(largest).max()), rel=1e-5)
    assert result.parts["clipped_heads"] == expected_count
    found, expected = weights(clipped), weights(plain)
    for layer, each in enumerate(largest):
        roots = (0.05 / each).clamp(max=1.0).sqrt()
        for leaf in ("weight", "bias"):
            query, key = (expected[f"model.layers.{layer}.self_attn.{name}_proj.{leaf}"] for name in "qk")
            query.view(KEY_HEADS, -1).mul_(roots[:, None])
            key.view(KEY_HEADS, -1).mul_(roots[:, None])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("kind", ["reference", "torch"])
def test_a_step_that_is_not_applied_scales_nothing(kind: str) -> None:
    engine = engine_of(kind, CLIPPED)
    before = {name: value.clone() for name, value in weights(engine).items()}
    result = engine.train_step(steps(packed=False), lr=LR, limits=NO_UPDATE)
    assert result.outcome is StepOutcome.REFUSED
    assert result.parts["clipped_heads"] == 0
    assert result.parts["largest_attention_logit"] > 0.05
    after = weights(engine)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_logit_of_an_evaluation_or_of_the_step_before_does_not_count() -> None:
    engine = engine_of("torch", CLIPPED)
    first, second = (step_batch(resolved({}, processes=1), number) for number in (1, 2))
    once = engine.train_step(first, lr=0.0, limits=NO_UPDATE).parts["largest_attention_logit"]
    engine.evaluate(iter(second.micro_batches))
    other = engine.train_step(second, lr=0.0, limits=NO_UPDATE).parts["largest_attention_logit"]
    again = engine.train_step(first, lr=0.0, limits=NO_UPDATE).parts["largest_attention_logit"]
    assert once == again != other
