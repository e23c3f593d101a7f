"""Smaller models from finished ones: quantization, structured pruning, and whole recipes (`headrace compress`)."""
