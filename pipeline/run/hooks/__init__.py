"""Features of the training loop, one file each."""
