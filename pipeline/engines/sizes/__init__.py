"""Closed formulas of device memory (weights, gradients, optimizer states, activations) and of communication traffic."""
