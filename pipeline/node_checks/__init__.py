"""Checks of nodes before a run starts on them, and the list of bad nodes of a run: `python -m pipeline.node_checks`."""
