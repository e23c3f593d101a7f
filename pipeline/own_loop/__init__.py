"""Custom training loops: `from pipeline.own_loop import prepare`. See docs/own_loop.md."""

from pipeline.own_loop.engine import LoopEngine
from pipeline.own_loop.prepare import prepare

__all__ = ["LoopEngine", "prepare"]
