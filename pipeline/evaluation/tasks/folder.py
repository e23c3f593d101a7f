"""Scores tasks on a model folder, by transformers in one process; the figures equal those of a run's engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pipeline.data.micro_batch import IGNORE
from pipeline.evaluation.tasks.batches import request_batches
from pipeline.evaluation.tasks.encode import EncodedTask
from pipeline.evaluation.tasks.figures import generated_figures, ranked_figures
from pipeline.evaluation.tasks.passes import PassShape, forward_passes

Show = Callable[[int, int], None]


def folder_figures(
    model: Any, task: EncodedTask, shape: PassShape, *, progress: Show = lambda _done, _all: None
) -> dict[str, float]:
    """The figures of a task.

    Args:
        model: model that `models.folder.loading.load_model` returns.
        task: the requests.
        shape: shape of the forward passes.
        progress: called with (requests done, all).
    """
    if task.generated:
        return generated_figures(task, continued(model, task, progress=progress))
    return ranked_figures(task, request_nats(model, task, shape, progress=progress))


@torch.inference_mode()
def request_nats(
    model: Any, task: EncodedTask, shape: PassShape, *, progress: Show = lambda _done, _all: None
) -> npt.NDArray[np.float64]:
    """-log p(continuation | context) of every request of a ranked task, float64 [requests]."""
    model.eval()
    passes, done = forward_passes(task.lengths, shape), 0
    found = torch.zeros(len(task.ids), dtype=torch.float64)
    for each, batch in zip(passes, request_batches(task, passes), strict=True):
        logits = model(input_ids=batch.input_ids.to(model.device), use_cache=False).logits
        assert batch.requests is not None
        # row by row: float32 logits of a whole batch would be 8 GB at B=8, T=2048, V=128k
        for row, labels, numbers in zip(logits, batch.labels, batch.requests, strict=True):
            counts = labels != IGNORE
            nats = F.cross_entropy(row[counts.to(row.device)].float(), labels[counts].to(row.device), reduction="none")
            found.index_add_(0, numbers[counts], nats.double().cpu())
        done += len(each.requests[0])
        progress(done, len(task.ids))
    return found.numpy()


@torch.inference_mode()
def continued(model: Any, task: EncodedTask, *, progress: Show = lambda _done, _all: None) -> npt.NDArray[np.int64]:
    """Greedy continuations of every prompt, int64 [prompts, new tokens]; filled up after an end."""
    from transformers import GenerationConfig  # noqa: PLC0415  for prompts only

    end, new = task.tokenizer.eos_token_id, task.section.new_tokens
    how = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=end, pad_token_id=end or 0)
    found = np.full((len(task.ids), new), end or 0, dtype=np.int64)
    for number, ids in enumerate(task.ids):
        prompt = torch.from_numpy(ids)[None].to(model.device)
        whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how)
        tokens = whole[0, len(ids) :].cpu().numpy()
        found[number, : len(tokens)] = tokens
        progress(number + 1, len(task.ids))
    return found
