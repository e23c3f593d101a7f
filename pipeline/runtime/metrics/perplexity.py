"""Perplexity and bits per byte of a language model, from its mean cross-entropy."""

from __future__ import annotations

import math


def perplexity(nats_per_token: float) -> float:
    """Returns exp of the mean cross-entropy in nats per token; infinite where it overflows a float, NaN for NaN."""
    return math.inf if nats_per_token > 700 else math.exp(nats_per_token)


def bits_per_byte(nats_per_token: float, *, tokens: int, text_bytes: int) -> float:
    """Converts cross-entropy to bits per UTF-8 byte of text, which is comparable between tokenizers.

    Source: Gao et al. 2020, The Pile (arXiv:2101.00027), section 3.1: bits per byte = (tokens / bytes) x loss / ln 2.

    Args:
        nats_per_token: mean cross-entropy in nats per token.
        tokens: tokens of the text, end-of-document tokens included.
        text_bytes: UTF-8 bytes of the same text.
    """
    return nats_per_token / math.log(2) * tokens / text_bytes


def show_bits_per_byte(value: float | None) -> str:
    """Formats bits per byte; "-" for None, as for text with a loss mask."""
    return "-" if value is None else f"{value:.4f}"
