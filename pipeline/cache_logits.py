"""Caches a teacher's logits for a distillation: `deepspeed pipeline/cache_logits.py --config CONFIG`."""

from __future__ import annotations

from foundation.cli import guarded, leave
from pipeline.run.distillation.cache_logits import add_arguments, main, run

__all__ = ["add_arguments", "main", "run"]

if __name__ == "__main__":
    leave(guarded(main))
