"""Parallelism applied to a Hugging Face decoder: tensor, sequence, context (Ulysses, ring), stages, fp8, compile."""
