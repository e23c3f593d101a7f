"""Drops log lines that are useless to the user: transformers imports torchao wherever it is installed."""

from __future__ import annotations

import logging
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia")


def quiet_torchao() -> None:
    """Drops torchao 0.18's lines on GPU kernels if there is no GPU, and on a call that torch 2.13 deprecates."""
    logging.getLogger("torchao").addFilter(_needs_gpu)
    logging.getLogger("torch.utils._pytree").addFilter(_is_news)


def quiet_deepspeed() -> None:
    """Drops the line DeepSpeed 0.19 prints to standard output without a GPU, for plans that import its schedule."""
    logging.getLogger("DeepSpeed").addFilter(_names_the_cpu)


def _names_the_cpu(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to CPU")


def _needs_gpu(record: logging.LogRecord) -> bool:
    return _DRIVER.exists() or not record.getMessage().startswith("Failed to load")


def _is_news(record: logging.LogRecord) -> bool:
    return "is an Enum subclass" not in record.getMessage()
