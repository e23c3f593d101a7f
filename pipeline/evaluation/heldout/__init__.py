"""Held-out (validation) loss, perplexity, bits per byte; completions of a prompt; tasks of lm-evaluation-harness."""
