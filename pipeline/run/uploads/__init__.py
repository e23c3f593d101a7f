"""Checkpoints and journals of a run that go up to an object store while it trains."""
