"""Structured pruning in width, depth and experts: importance by activations, search for a shape, cutting of tensors."""
