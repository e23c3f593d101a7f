"""Coordinate check and learning-rate transfer over widths and depths (muP, CompleteP)."""
