"""Copies of checkpoints in the nodes' host memory; a restart reads the copies that were not lost."""
