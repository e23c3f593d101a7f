"""A batch in which a student has continued some of the samples.

A sample is continued where its token after the prompt is a target of the data: not in padding, not where the prompt
ends with its document, not in the part of a chat that is not trained on. Otherwise it stays what it was. What follows a
sampled end-of-text token is no target.

Shapes: B samples, T positions, n chosen rows, G new tokens.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from pipeline.data.micro_batch import IGNORE, MicroBatch


def with_samples(batch: MicroBatch, rows: Tensor, tokens: Tensor, *, prompt: int, end_id: int | None) -> MicroBatch:
    """A batch in which the student has continued some rows; `sampled` is set.

    Inputs after the new tokens stay what they were: nothing depends on them.

    Args:
        batch: a batch of data, [B, T].
        rows: int64 [n], the rows that were chosen; those whose token after the prompt is no target stay data.
        tokens: int64 [n, G], of which T - `prompt` + 1 fit.
        prompt: tokens of the prompt, P.
        end_id: the token after which nothing is a target.
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
