"""Goodput of runs: how the wall-clock time of a run's directory was spent, and the goodput expected under failures."""
