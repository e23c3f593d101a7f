"""Metrics of a run: journal (metrics.jsonl), MFU, step clock, stragglers, profiler, console, W&B, TensorBoard."""
