"""Processes and what they report: launch, faults, metrics, goodput, machines."""
