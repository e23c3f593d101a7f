"""Processes and their reports: launch, faults, metrics, goodput, machines."""
