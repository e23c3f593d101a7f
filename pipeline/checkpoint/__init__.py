"""Distributed checkpoints: named shards saved asynchronously, committed atomically, resharded on load, verified."""
