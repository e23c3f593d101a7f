"""Training on DeepSpeed: ZeRO stages 0 to 3, offload, its pipeline engine; state as named shards."""
