"""Sampled tokens have the student's distribution, and are a function of seed, step, sample and position."""

from __future__ import annotations

import pytest
import torch

from pipeline.data.micro_batch import IGNORE
from pipeline.engines.parallel.vocabulary import VocabularyShard
from pipeline.run.distillation.sampling import Place, Sampler, gumbel, noise_key

KEY = noise_key(7)


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
