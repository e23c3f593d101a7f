"""Checks of nodes before a run starts on them (`python -m pipeline.cluster.node_checks`); the list of bad nodes."""
