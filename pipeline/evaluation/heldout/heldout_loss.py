"""Held-out loss of a causal language model, with perplexity and bits per byte.

- loss: mean over target tokens of -ln p(token | the tokens before it in its window), nats per token. With a loss mask
  the targets are the mask's, as in training;
- perplexity: exp(loss), which depends on the tokenizer;
- bits per byte: loss / ln 2 x tokens / bytes of the split. It does not depend on the tokenizer, and compares models
  with different tokenizers. Source: Gao et al. 2020, "The Pile", section 3.1 (arXiv:2101.00027). Not defined with a
  loss mask, since the loss of some tokens does not relate to the bytes of all.

Shapes: B windows per batch, T tokens per window, V vocabulary size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from pipeline.data.dataset import TokenDataset, choose_windows
from pipeline.data.micro_batch import make_batch
from pipeline.evaluation.heldout.data import count_targets, count_targets_of_each, loss_by_source, targets_of
from pipeline.models.layers import is_recurrent
from pipeline.runtime.metrics.perplexity import bits_per_byte, perplexity


@dataclass(frozen=True)
class HeldOut:
    """Result of an evaluation.

    Attributes:
        loss_nats: mean loss, nats per token.
        perplexity: exp(loss_nats); infinite where that overflows.
        bits_per_byte: bits per UTF-8 byte of the split's text; None with a loss mask.
        tokens: number of target tokens; with a loss mask, of the tokens in the mask.
        tokens_per_second: tokens per second of forward passes and loss, targets or not, including reading, after a
            warmup.
        sources: name of a source of the dataset with targets -> loss over its targets, nats per token.
    """

    loss_nats: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    tokens_per_second: float
    sources: dict[str, float] = field(default_factory=dict)


def evaluate(
    model: Any,
    dataset: TokenDataset,
    *,
    batch_size: int,
    device: torch.device | str,
    max_windows: int | None = None,
    mask_documents: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> HeldOut:
    """Evaluates the windows of a split; each token is predicted from the tokens before it in its window.

    Args:
        model: called with int64 [B, T] on `device`, returns an object with `logits` [B, T, V], as in Hugging Face. Its
            training mode is restored.
        dataset: windows int64 [T + 1].
        batch_size: B; the result does not depend on it beyond rounding.
        device: device of the model.
        max_windows: number of windows, evenly spaced over the split; None for all.
        mask_documents: apply the document mask, as `data.mask_documents` does in training.
        progress: called with (windows done, all windows) after each batch.

    Raises:
        DataError: the loss mask leaves no target in these windows.
    """
    chosen = choose_windows(dataset.windows, max_windows)
    targets = count_targets(dataset, chosen, mask_documents=mask_documents)
    score = partial(_loss, model, dataset, device=device, mask_documents=mask_documents)
    was_training = bool(model.training)
    model.eval()
    try:
        with torch.inference_mode():
            # warmup: the first pass includes lazy allocation and the unpacking of quantized weights
            score(chosen[:1])
            start = time.perf_counter()
            losses = np.concatenate(list(_batches(score, chosen, batch_size, progress)))
            seconds = time.perf_counter() - start
    finally:
        model.train(was_training)
    loss, rate = float(losses.sum()) / targets, len(chosen) * dataset.sequence_length / seconds
    bits = None if dataset.masked else bits_per_byte(loss, tokens=dataset.tokens, text_bytes=dataset.bytes)
    counts = count_targets_of_each(dataset, chosen, mask_documents=mask_documents)
    return HeldOut(loss, perplexity(loss), bits, targets, rate, loss_by_source(dataset, chosen, losses, counts))


def _batches(
    score: Callable[[npt.NDArray[np.int64]], torch.Tensor],
    chosen: npt.NDArray[np.int64],
    batch_size: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[npt.NDArray[np.float64]]:
    """Yields the loss of each window of a batch, summed over its targets, in nats: float64 [B]."""
    for begin in range(0, len(chosen), batch_size):
        windows = chosen[begin : begin + batch_size]
        # the copy waits for the device: the measured time includes it
        yield score(windows).cpu().numpy()
        if progress is not None:
            progress(begin + len(windows), len(chosen))


def _of_documents(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Computes the logits [B, T, V] of each document alone: recurrent layers have no document mask."""
    rows = []
    for row, row_positions in zip(ids, positions, strict=True):
        begins = (row_positions == 0).nonzero()[1:, 0].tolist()  # the first document's is 0
        parts = row[None].tensor_split(begins, dim=1)
        rows.append(torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], dim=1))
    return torch.cat(rows)


def _loss(
    model: Any,
    dataset: TokenDataset,
    windows: npt.NDArray[np.int64],
    *,
    device: torch.device | str,
    mask_documents: bool,
) -> torch.Tensor:
    """Loss of B windows, each summed over its targets, float64 [B]."""
    rows = dataset.read(windows)
    tokens = torch.from_numpy(rows).to(device)
    loss_mask = torch.from_numpy(targets_of(dataset, windows, mask_documents=mask_documents)).to(device)
    inputs = {"input_ids": tokens[:, :-1]}
    if mask_documents:  # transformers derives the document mask from positions that restart
        positions = make_batch(rows, dataset.boundaries(windows)).positions
        assert positions is not None
        inputs["position_ids"] = positions.to(device)
    if mask_documents and is_recurrent(getattr(model, "config", None)):
        logits = _of_documents(model, tokens[:, :-1], inputs["position_ids"])
    else:
        logits = model(**inputs, use_cache=False).logits
    # window by window: float32 logits of a whole batch would be 8 GB at B=8, T=2048, V=128k
    losses = [
        F.cross_entropy(one.float(), target, reduction="none")[counts]
        for one, target, counts in zip(logits, tokens[:, 1:], loss_mask, strict=True)
    ]
    return torch.stack([loss.double().sum() for loss in losses])
