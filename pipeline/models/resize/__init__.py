"""Makes smaller configs of an architecture: scaled in width for scaling ladders, or shrunk to tiny for proofs."""
