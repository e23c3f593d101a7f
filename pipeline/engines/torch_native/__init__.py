"""Training on native PyTorch: FSDP2, DDP, hybrid sharding, pipeline schedules (1F1B, zero bubble), one GPU."""
