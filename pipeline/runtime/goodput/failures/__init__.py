"""Failures of nodes: the goodput that is expected under them, simulated, and the best checkpoint interval."""
