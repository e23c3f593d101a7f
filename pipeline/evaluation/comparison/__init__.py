"""Compares models: size, held-out loss, KL to the first model, generation, samples, each by a program serving it."""
