"""The samples of a step that the student continues, and the step's batch with the tokens it has sampled.

Samples are chosen, not steps. If the fraction of a step's samples is a whole number, every step's loss has the same
mixture, and loss curve and spike detection keep their usual meaning. The choice is a function of (run.seed, step)
alone. Chosen samples fall on ranks at random; all ranks make as many forward passes as the rank with most of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.batch import BatchSizes
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.compression import OnPolicySection
from pipeline.data.micro_batch import IGNORE, MicroBatch, StepBatch
from pipeline.data.permutation import derive_key, permute
from pipeline.data.step_samples import most_on_a_rank, samples_of_rows
from pipeline.engines.base import Engine
from pipeline.engines.parallel.compilation import compiles
from pipeline.run.distillation.generation import Generator, Prompts
from pipeline.run.distillation.on_policy_loss import own_means
from pipeline.run.distillation.sampling import Sampler, noise_key

I64 = npt.NDArray[np.int64]


def chosen_samples(step: int, *, samples: int, fraction: float, seed: int) -> I64:
    """Chooses the indices of a step's samples that the student continues: over many steps, `fraction` of all.

    Args:
        step: number of the step, from 1.
        samples: number of samples in a step.
        fraction: share of the samples that are continued; may be less than one sample per step.
        seed: the run's seed.
    """
    count = int(step * samples * fraction) - int((step - 1) * samples * fraction)
    place = permute(np.arange(samples), size=samples, key=derive_key(seed, "on-policy samples", step))
    return np.flatnonzero(place < count)


def passes_per_step(batch: BatchSizes, section: OnPolicySection, *, chosen: I64) -> int:
    """Counts the groups of samples that every rank continues one after another in a step."""
    most = most_on_a_rank(batch, chosen)
    return -(-most // (section.batch or max(most, 1)))


@dataclass(frozen=True)
class GeneratedSamples:
    """Counts and time of a step's generation, over all ranks.

    Attributes:
        samples: number of chosen samples, including those that stayed data.
        tokens: number of generated tokens that are targets.
        seconds: seconds on this rank, from the first prompt to the last token.
    """

    samples: int
    tokens: int
    seconds: float


class OnPolicySamples:
    """Lets the student continue its share of every step's samples.

    Args:
        run: the resolved config, with `distill.on_policy`.
        engine: the student's engine.
        rank: global rank of this process.
        end_id: the end-of-text token; None for a tokenizer without one.
        on_progress: called after every new token.
    """

    def __init__(
        self,
        run: ResolvedRun,
        engine: Engine,
        *,
        rank: int,
        device: torch.device,
        end_id: int | None,
        on_progress: Callable[[], None],
    ) -> None:
        assert run.config.distill is not None
        assert run.config.distill.on_policy is not None
        self._section, self._batch, self._seed = run.config.distill.on_policy, run.batch, run.config.run.seed
        self._distill, self._device, self._end_id = run.config.distill, device, end_id
        coordinates = run.topology.coordinates(rank)
        self._rows, self._counts = samples_of_rows(run.batch, coordinates["dp"]), coordinates["tp"] == 0
        self._length = self._section.length(run.batch.sequence_length)
        self._generator = Generator(
            engine,
            Sampler(self._section.temperature, key=noise_key(self._seed)),
            new_tokens=self._length,
            multiple=run.topology.tp,
            kv_cache=self._section.kv_cache,
            compiled=compiles(run.config.compile),
            on_progress=on_progress,
        )
        self._generated: dict[int, GeneratedSamples] = {}

    def complete(self, step: StepBatch) -> StepBatch:
        """Returns the step's batch, with chosen samples continued by the student, on this rank's device. Collective."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # otherwise this time would include the step before
        started = time.perf_counter()
        batch = joined([micro.to(self._device) for micro in step.micro_batches])
        chosen = chosen_samples(
            step.step, samples=self._batch.samples, fraction=self._section.fraction, seed=self._seed
        )
        rows = torch.from_numpy(np.flatnonzero(np.isin(self._rows, chosen))).to(self._device)
        groups = passes_per_step(self._batch, self._section, chosen=chosen)
        tokens = self._continued(batch, rows, groups=groups, step=step.step)
        whole = with_samples(batch, rows, tokens, prompt=self._section.prompt_tokens, end_id=self._end_id)
        targets, sampled = self._counted(whole)
        self._generated[step.step] = GeneratedSamples(len(chosen), sampled, time.perf_counter() - started)
        return StepBatch.of(step.step, whole.split(self._batch.micro), targets)

    def figures(self, step: int, means: dict[str, float], *, seconds: float) -> dict[str, float]:
        """Returns values for a step's row of metrics: means of loss parts over their own targets, and generation.

        Args:
            step: step for which `complete` was called.
            means: mean of each part of the loss over all targets of the step, by name.
            seconds: time of the step, in seconds.
        """
        made = self._generated.pop(step)
        return {
            **own_means(means, self._distill),
            "generated_tokens": made.tokens,
            "generation_seconds": made.seconds,
            "generation_share": made.seconds / seconds,
            "sampled_tokens_per_second": made.samples * self._length / made.seconds,
        }

    def _continued(self, batch: MicroBatch, rows: Tensor, *, groups: int, step: int) -> Tensor:
        """Continues some rows in `groups` groups; returns the new tokens, int64 [rows, G]."""
        prompts = self._prompts(batch, rows)
        size = self._section.batch or max(1, len(rows))
        found = []
        for group in range(groups):
            own = prompts.select(slice(group * size, (group + 1) * size))
            # a rank without rows makes the passes, too: the other ranks' collectives need it
            real = len(own.samples) > 0
            tokens = self._generator.generate(own if real else self._prompts(batch, rows.new_zeros(1)), step=step)
            found += [tokens] if real else []
        return torch.cat(found) if found else rows.new_zeros((0, self._length))

    def _prompts(self, batch: MicroBatch, rows: Tensor) -> Prompts:
        prompt = slice(0, self._section.prompt_tokens)
        ids = batch.input_ids[rows, prompt]
        if batch.positions is None or batch.documents is None:
            positions, documents = torch.arange(ids.shape[1], device=self._device).expand_as(ids), None
        else:
            positions, documents = batch.positions[rows, prompt], batch.documents[rows, prompt]
        samples = torch.from_numpy(self._rows).to(self._device)[rows]
        return Prompts(ids, positions, documents, samples)

    def _counted(self, batch: MicroBatch) -> tuple[int, int]:
        """Counts the targets, and the sampled ones among them, over all ranks."""
        assert batch.sampled is not None
        counts = batch.labels != IGNORE
        sums = torch.stack([counts.sum(), (counts & batch.sampled).sum()]) * self._counts
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        targets, sampled = sums.tolist()
        return targets, sampled


def with_samples(batch: MicroBatch, rows: Tensor, tokens: Tensor, *, prompt: int, end_id: int | None) -> MicroBatch:
    """Makes a batch in which the student has continued some rows; sets `sampled`.

    A sample is continued only if its token after the prompt is a target of the data. So it stays unchanged in padding,
    where the prompt ends with its document, and in untrained parts of a chat. Tokens after a sampled end-of-text token
    are not targets. Shapes: B samples, T positions, n chosen rows, G new tokens.

    Inputs after the new tokens stay unchanged: nothing depends on them.

    Args:
        batch: a batch of data, [B, T].
        rows: int64 [n], the chosen rows; rows whose token after the prompt is not a target stay data.
        tokens: int64 [n, G], the new tokens, of which T - `prompt` + 1 fit.
        prompt: number of tokens of the prompt, P.
        end_id: end-of-text token, after which no token is a target.
    """
    goes_on = batch.labels[rows, prompt - 1] != IGNORE
    rows, tokens = rows[goes_on], tokens[goes_on]
    inputs = tokens[:, : batch.input_ids.shape[1] - prompt]  # the last token of a full sample is a label only
    ends = torch.zeros_like(tokens) if end_id is None else (tokens == end_id).long()
    ids, labels, sampled = batch.input_ids.clone(), batch.labels.clone(), torch.zeros_like(batch.labels).bool()
    ids[rows, prompt : prompt + inputs.shape[1]] = inputs
    labels[rows] = IGNORE
    labels[rows, prompt - 1 : prompt - 1 + tokens.shape[1]] = tokens.masked_fill(ends.cumsum(1) > ends, IGNORE)
    sampled[rows] = True
    changed = replace(batch, input_ids=ids, labels=labels, sampled=sampled)
    if batch.positions is None or batch.documents is None:
        return changed
    positions, documents = batch.positions.clone(), batch.documents.clone()
    ahead = torch.arange(1, positions.shape[1] - prompt + 1, device=positions.device)
    positions[rows, prompt:] = positions[rows, prompt - 1, None] + ahead
    documents[rows, prompt:] = documents[rows, prompt - 1, None]
    return replace(changed, positions=positions, documents=documents)


def joined(micro_batches: list[MicroBatch]) -> MicroBatch:
    """Joins micro-batches into one."""
    columns = ([getattr(micro, field.name) for micro in micro_batches] for field in fields(MicroBatch))
    return MicroBatch(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]
