"""Validation of a run: layouts and features that go together, and errors with remedies for all others."""
