"""Quantization: rounding, GPTQ, SignRound, smoothing, rotation, mixed bits; compressed-tensors and GGUF."""
