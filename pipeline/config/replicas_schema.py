"""Schema of the section `replicas`: replicas of the model that come and go within a run, a quorum per step."""

from __future__ import annotations

from pipeline.config.quorum_schema import QuorumSection


class ReplicasSection(QuorumSection):
    """Replicas of the model that divide every step's batch and sum their gradients; they may leave and join."""
