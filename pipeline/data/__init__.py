"""Training data: mixture and mixing weights, order of samples, memory-mapped datasets, packing, loader, staging."""
