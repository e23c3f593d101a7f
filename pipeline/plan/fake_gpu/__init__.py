"""A fake CUDA device: a step on fake tensors gives memory, collectives and host syncs (`check --exact`)."""
