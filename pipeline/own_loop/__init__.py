"""Custom training loops: `from pipeline.own_loop import prepare`. See docs/how-to/own-loop.md."""

from pipeline.own_loop.engine import LoopEngine
from pipeline.own_loop.prepare import prepare

__all__ = ["LoopEngine", "prepare"]
