"""Copies of checkpoints in the nodes' host memory, from which a restart reads what was not lost."""
