"""Goodput of runs: where the wall clock of a run's directory went, and what is to be expected under failures."""
