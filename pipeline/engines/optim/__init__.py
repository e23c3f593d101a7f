"""Optimizers and their states: AdamW, Lion, SGD, 8-bit and bf16 moments, master weights, parameter groups."""
