"""Where `measure` was before 0.7."""

from pipeline.evaluation.measure import measure

__all__ = ["measure"]
