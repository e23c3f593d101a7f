"""Features of the training loop, a file each."""
