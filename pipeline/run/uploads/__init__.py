"""Uploads of a run's checkpoints and journals to an object store while it trains."""
