"""Engines execute a training step: DeepSpeed, native PyTorch (FSDP2, DDP, one GPU) and the plain reference."""
