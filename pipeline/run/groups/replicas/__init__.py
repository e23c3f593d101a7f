"""Replicas of the model that come and go within a run and divide every step's batch: a quorum per step, on torchft."""
