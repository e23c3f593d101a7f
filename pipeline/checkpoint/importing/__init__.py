"""Checkpoints of other trainers: weights, optimizer states and step, read tensor by tensor, without their code."""
