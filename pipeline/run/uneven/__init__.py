"""Uneven devices: measured shares of the batch and measured pipeline stages."""
