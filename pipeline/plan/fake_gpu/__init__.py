"""A CUDA device that is not there: a step on fake tensors gives memory, collectives host syncs (`check --exact`)."""
