"""Pydantic sections of a run's config: keys, types, defaults and descriptions."""
