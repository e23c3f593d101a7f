"""Evaluation of a trained model: held-out loss, perplexity, bits per byte, and completions of a prompt."""
