"""What a finished model is worth: held-out loss, perplexity, bits per byte, and a completion to read."""
