"""Fixture: four gloo processes for the checks on ranks."""

from tests.engines.parallel.conftest import ranks

__all__ = ["ranks"]
