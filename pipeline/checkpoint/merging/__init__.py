"""Merges checkpoints of runs into one: weighted means of their fp32 weights (`headrace merge`)."""
