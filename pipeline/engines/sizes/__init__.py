"""Closed formulas for device memory (weights, gradients, optimizer states, activations) and communication traffic."""
