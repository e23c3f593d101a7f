"""Smaller models from finished ones: weight-only quantization."""
