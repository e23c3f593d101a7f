"""The student's continuations are those of transformers, with and without a cache; sampling has the right odds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from transformers import GenerationConfig, MambaConfig

from foundation.errors import ConfigError
from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.engines.base import Engine
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.vocabulary import VocabularyShard
from pipeline.models.construction.meta import build_meta
from pipeline.run.distillation.generation import Generator, Prompts
from pipeline.run.distillation.kv_cache import cache_bytes_per_token, check_kv_cache
from pipeline.run.distillation.sampling import Place, Sampler, gumbel, noise_key
from tests.models.architectures import CONFIGS, T, V, batch_of, meta_of, plain_decoder, with_weights

PROMPT, NEW = 10, 12
KEY = noise_key(7)


@dataclass(frozen=True)
class OneDecoder:
    """The part of an engine that generation uses: `TorchReference.forward_passes`."""

    decoder: Decoder

    @torch.no_grad()
    def forward_passes(self, batches: Iterable[MicroBatch], objective: Any) -> None:
        for batch in batches:
            self.decoder(batch.input_ids, batch, objective)


def continued(
    decoder: Decoder, prompts: Prompts, *, temperature: float = 0.0, multiple: int = 1, kv_cache: bool = True
) -> list[list[int]]:
    sampler = Sampler(temperature, key=noise_key(7))
    generator = Generator(cast(Engine, OneDecoder(decoder)), sampler, NEW, multiple, kv_cache, compiled=False)
    tokens: list[list[int]] = generator.generate(prompts, step=1).tolist()
    return tokens


def prompts_of(batch: MicroBatch) -> Prompts:
    ids = batch.input_ids[:, :PROMPT]
    if batch.positions is None or batch.documents is None:
        positions, documents = torch.arange(PROMPT).expand_as(ids), None
    else:
        positions, documents = batch.positions[:, :PROMPT], batch.documents[:, :PROMPT]
    return Prompts(ids, positions, documents, torch.arange(len(ids)))


@pytest.mark.integration
@pytest.mark.parametrize(
    "architecture",
    ["llama", "llama_tied", "qwen3", "mistral", "gemma3_text", "phi", "mixtral", "deepseek_v3"],
)
def test_at_temperature_0_the_tokens_are_those_of_transformers_greedy_generate(architecture: str) -> None:
    prompts = prompts_of(batch_of(samples=3))
    theirs: Any = with_weights(meta_of(architecture, attention="eager")).eval()
    theirs.generation_config.eos_token_id = None
    greedy = GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
    ids = theirs.generate(prompts.ids, attention_mask=torch.ones_like(prompts.ids), generation_config=greedy)
    expected = ids[:, PROMPT:].tolist()
    assert len({token for row in expected for token in row}) > 2
    chunked = {"llama": 4}.get(architecture)
    decoder = plain_decoder(architecture, chunk=chunked).eval()
    assert continued(decoder, prompts) == expected
    assert continued(decoder, prompts, multiple=4) == expected
    assert continued(decoder, prompts, kv_cache=False) == expected


def test_learned_positions_go_on_after_the_prompt() -> None:
    decoder, prompts = plain_decoder("gpt2").eval(), prompts_of(batch_of())
    cached = continued(decoder, prompts, temperature=8.0)  # at 1 it has one likely token
    assert len({token for row in cached for token in row}) > 4
    assert continued(decoder, prompts, temperature=8.0, kv_cache=False) == cached


def test_a_prompt_of_several_documents_is_continued_as_its_last_one_alone() -> None:
    batch = batch_of(borders=((0, 4), (0, 2, 7)))
    decoder = plain_decoder("mistral").eval()
    packed = continued(decoder, prompts_of(batch), temperature=1.0)
    assert continued(decoder, prompts_of(batch), temperature=1.0, multiple=4) == packed
    assert continued(decoder, prompts_of(batch), temperature=1.0, kv_cache=False) == packed
    for row, begun in enumerate((4, 7)):
        ids = batch.input_ids[row : row + 1, begun:PROMPT]
        alone = Prompts(ids, torch.arange(PROMPT - begun)[None], None, torch.tensor([row]))
        assert continued(decoder, alone, temperature=1.0) == [packed[row]]


def test_a_sample_gets_the_same_tokens_whichever_others_are_continued_with_it() -> None:
    decoder, prompts = plain_decoder("llama").eval(), prompts_of(batch_of(samples=4))
    together = continued(decoder, prompts, temperature=1.0)
    assert together != continued(decoder, prompts)
    one_by_one = [continued(decoder, prompts.select(slice(i, i + 1)), temperature=1.0)[0] for i in range(4)]
    assert one_by_one == together


def test_every_token_counts_as_progress_of_a_run_that_generates_for_longer_than_the_hang_timeout() -> None:
    engine, seen = cast(Engine, OneDecoder(plain_decoder("llama").eval())), []
    sampler = Sampler(0.0, key=noise_key(7))
    generator = Generator(engine, sampler, NEW, 1, kv_cache=True, compiled=False, on_progress=lambda: seen.append(1))
    generator.generate(prompts_of(batch_of()), step=1)
    assert len(seen) == NEW


def test_a_caches_bytes_are_those_of_the_architecture() -> None:
    assert cache_bytes_per_token(meta_of("llama")) == 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, fp32
    assert cache_bytes_per_token(meta_of("gpt2")) == 3 * 2 * 4 * 8 * 4
    assert cache_bytes_per_token(meta_of("mixtral")) == 3 * 2 * 2 * 8 * 4
    assert cache_bytes_per_token(meta_of("deepseek_v3")) == 3 * (16 + 8) * 4  # the latent vector, and rope


LONGROPE = ["phi3_longrope", "phimoe"]


@pytest.mark.parametrize("architecture", [name for name in CONFIGS if name not in LONGROPE])
@pytest.mark.parametrize("mask_documents", [False, True])
def test_every_tested_architecture_can_have_a_cache(architecture: str, mask_documents: bool) -> None:
    check_kv_cache(meta_of(architecture), mask_documents=mask_documents, sequence_length=T)


def test_where_a_cache_would_change_the_logits_it_is_refused() -> None:
    check_kv_cache(meta_of("llama", attention="eager"), mask_documents=False, sequence_length=T)
    with pytest.raises(ConfigError, match=r"logits of a tiny llama are others than without"):  # it looks at one pass
        check_kv_cache(meta_of("llama", attention="eager"), mask_documents=True, sequence_length=T)
    mamba = MambaConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2)
    model = build_meta(mamba, dtype=torch.float32, attn_implementation="eager")
    with pytest.raises(ConfigError, match=r"kv_cache = True(.|\n)*mamba"):
        check_kv_cache(model, mask_documents=False, sequence_length=T)


@pytest.mark.parametrize("architecture", LONGROPE)
def test_where_a_continuation_passes_the_threshold_of_longrope_a_cache_is_refused(architecture: str) -> None:
    check_kv_cache(meta_of(architecture), mask_documents=False, sequence_length=10)  # up to it there are short factors
    with pytest.raises(ConfigError, match=r"logits of a tiny phi(3|moe) are others than without"):
        check_kv_cache(meta_of(architecture), mask_documents=False, sequence_length=T)


def place(samples: int, *, width: int = 1, column: int = 0, step: int = 3, number: int = 2) -> Place:
    return Place(width, column, torch.arange(samples), step, number)


def drawn(sampler: Sampler, where: Place, logits: torch.Tensor, *, chunk: int | None = None) -> torch.Tensor:
    """Tokens from logits [B, T, V], handed over whole or in chunks of so many rows as a fused head does."""
    sampler.begin(where)
    labels = torch.full(logits.shape[:2], IGNORE)
    if chunk is None:
        sampler(logits, labels)
    else:
        for rows, own in zip(logits.flatten(0, 1).split(chunk), labels.flatten().split(chunk), strict=True):
            sampler(rows[None], own[None])
    return sampler.tokens()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_as_frequent_as_the_softmax_of_the_logits_says(temperature: float) -> None:
    logits = torch.tensor([2.0, 0.5, -1.0, 1.0, -4.0])
    count = 40_000
    tokens = drawn(Sampler(temperature, key=KEY), place(count), logits.expand(count, 1, 5))
    expected = torch.softmax(logits / temperature, -1)
    found = torch.bincount(tokens, minlength=5) / count
    # five standard deviations of a share of 40,000 draws
    assert bool(((found - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()), (found, expected)


def test_noise_is_independent_between_positions_steps_samples_and_seeds_and_a_shard_has_its_columns_of_it() -> None:
    whole = gumbel(place(6), key=KEY, first=0, count=1000)
    torch.testing.assert_close(gumbel(place(6), key=KEY, first=5, count=13), whole[:, 5:18], rtol=0, atol=0)
    torch.testing.assert_close(whole.mean(), torch.tensor(0.5772), rtol=0, atol=0.05)  # Euler's constant
    assert whole.isfinite().all()
    others = [
        gumbel(place(6, number=3), key=KEY, first=0, count=1000),
        gumbel(place(6, step=4), key=KEY, first=0, count=1000),
        gumbel(place(6), key=noise_key(8), first=0, count=1000),
        whole.roll(1, 0),
    ]
    for other in others:
        correlation = torch.corrcoef(torch.stack([whole.flatten(), other.flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.05  # 6,000 pairs: four standard deviations


@pytest.mark.parametrize("chunk", [1, 2, 5, 12])
def test_the_column_is_found_in_whatever_chunks_the_logits_come(chunk: int) -> None:
    logits = torch.randn(4, 3, 11, generator=torch.Generator().manual_seed(0))
    where = place(4, width=3, column=1)
    assert drawn(Sampler(0.0, key=KEY), where, logits, chunk=chunk).tolist() == logits[:, 1].argmax(-1).tolist()
    whole = drawn(Sampler(1.0, key=KEY), where, logits)
    assert drawn(Sampler(1.0, key=KEY), where, logits, chunk=chunk).tolist() == whole.tolist()


def test_the_second_half_of_a_vocabulary_gets_its_own_noise() -> None:
    logits = torch.zeros(50, 1, 8)
    sampler = Sampler(1.0, key=KEY)
    whole = drawn(sampler, place(50), logits)
    sampler.begin(place(50))
    sampler(logits[..., 4:], torch.full((50, 1), IGNORE), vocabulary=VocabularyShard(None, 4))
    upper = whole >= 4
    assert upper.any()
    assert sampler.tokens()[upper].tolist() == whole[upper].tolist()
