"""Measures the host's time for a decoder layer beside its kernels: dispatch, autograd, Python.

Measured is the CPU time of this thread, which includes autograd's backward pass on a CPU: the result is a difference of
two measurements, and other work on the core may take longer than either.
"""

from __future__ import annotations

import time

import torch
from transformers import LlamaConfig, LlamaModel

from pipeline.plan.calibration.measure import REPEATS, seconds_of

_TOKENS, _HIDDEN = 8, 32
"""Sizes so small that kernels take almost no time."""

_FEW, _MANY = 2, 6
"""Numbers of layers of the two models whose times are subtracted: work done once for all layers cancels."""


def host_seconds() -> tuple[float, float]:
    """Seconds of a layer like Llama's on the CPU, eager, for one micro-batch: its forward and its backward pass."""
    few, many = _passes(_FEW), _passes(_MANY)
    forward, backward = (max(0.0, (b - a) / (_MANY - _FEW)) for a, b in zip(few, many, strict=True))
    return forward, backward


def _passes(layers: int) -> tuple[float, float]:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=1,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model, cpu = LlamaModel(config), torch.device("cpu")
    ids = torch.zeros(1, _TOKENS, dtype=torch.long)

    def forward() -> torch.Tensor:
        states: torch.Tensor = model(input_ids=ids).last_hidden_state
        return states

    alone = seconds_of(forward, cpu, repeats=2 * REPEATS, clock=time.thread_time)[1]
    both = seconds_of(lambda: forward().sum().backward(), cpu, repeats=2 * REPEATS, clock=time.thread_time)[1]
    return alone, both - alone
