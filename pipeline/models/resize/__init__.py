"""Smaller configs of an architecture: scaled in width for scaling ladders, shrunk to a tiny one for proofs."""
