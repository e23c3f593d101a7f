"""Cost that on-policy distillation adds to a step, before the run starts: for `headrace check`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeline.data.step_samples import most_on_a_rank
from pipeline.run.before.memory_summary import shown_bytes
from pipeline.run.before.summary import Entry
from pipeline.run.distillation.kv_cache import cache_bytes_per_token
from pipeline.run.distillation.on_policy import chosen_samples, passes_per_step
from pipeline.run.prepare import PreparedRun

LOOKED_AT = 64
"""Number of a run's first steps whose choices of samples are compared."""


@dataclass(frozen=True)
class GenerationCost:
    """Generation on the rank with most samples, in the step with most samples among the first `LOOKED_AT` steps.

    Attributes:
        passes: number of sequential forward passes, in addition to those of training.
        samples: number of samples that are continued at a time.
        positions: number of positions that are computed for one sample.
        cache_bytes: bytes of cached keys and values; 0 without a cache, None where unknown.
        gathered_bytes: bytes of weights gathered for all passes of a step (stage 3); 0 where weights are not sharded.
    """

    passes: int
    samples: int
    positions: int
    cache_bytes: int | None
    gathered_bytes: int


def generation_cost(prepared: PreparedRun) -> GenerationCost:
    """Computes the cost of generation in a run with `distill.on_policy`."""
    run = prepared.run
    assert run.config.distill is not None
    assert run.config.distill.on_policy is not None
    section, batch = run.config.distill.on_policy, run.batch
    length = section.length(batch.sequence_length)
    most = np.empty(0, np.int64)
    for step in range(1, min(run.steps, LOOKED_AT) + 1):
        chosen = chosen_samples(step, samples=batch.samples, fraction=section.fraction, seed=run.config.run.seed)
        most = max(most, chosen, key=lambda each: most_on_a_rank(batch, each))
    samples = min(most_on_a_rank(batch, most), section.batch or batch.samples)
    prompt, passes = section.prompt_tokens, passes_per_step(batch, section, chosen=most) * length
    kept = prompt + length - 1
    per_token = cache_bytes_per_token(prepared.model) if section.kv_cache else 0
    sharded = run.config.zero_optimization.stage == 3 and run.topology.dp > 1
    weights = sum(each.numel() * each.element_size() for each in prepared.model.parameters()) // run.topology.tp
    return GenerationCost(
        passes=passes,
        samples=samples,
        positions=kept if section.kv_cache else length * prompt + length * (length - 1) // 2,
        cache_bytes=None if per_token is None else samples * kept * per_token // run.topology.tp,
        gathered_bytes=passes * weights if sharded else 0,
    )


def generation_entries(prepared: PreparedRun) -> Iterator[Entry]:
    """Yields the cost of the student's generation in a step; nothing in other runs."""
    section = prepared.run.config.distill
    if section is None or section.on_policy is None:
        return
    cost, batch = generation_cost(prepared), prepared.run.batch
    text = (
        f"{cost.passes:,} forward passes per step beside the {batch.accumulation} of training, of"
        f" {cost.samples} samples on the rank with most; {cost.positions:,} positions per sample"
    )
    if section.on_policy.kv_cache:
        known = "not known" if cost.cache_bytes is None else shown_bytes(cost.cache_bytes)
        text += f"; keys and values: {known}"
    else:
        text += ", no key/value cache"
    if cost.gathered_bytes:
        text += f"; each gathers all weights (stage 3): {shown_bytes(cost.gathered_bytes)} per step and rank"
    yield Entry("on-policy", text, vars(cost))
